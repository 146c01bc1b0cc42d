"""Run the same methods between machines that share no data, over Flower.

This package only translates messages: a client runs ``engine.local.train``, the server runs
``engine.round.settle``, so the numbers are those of the sequential engine, bit for bit.

    wire          trees of tensors <-> Flower's records; only the expected form is decoded
    samples       a client's data folder
    halves        the problem as the server sees it (no data) and as a client sees it (only its own)
    own           a client's state between rounds, on its disk
    rules         limits of the server: time, sizes, norms
    consent       what a client agrees to, in its own rules
    scoring       federated evaluation: sums of the scores of clients that agree
    audit         an append-only log in which every line holds the hash of the one before
    record        what a run's server notes: the audit log and its progress
    exposition    health and metrics on the loopback interface
    units         files for systemd and for `docker compose`
    client        a client's replies          client_app   the Flower ClientApp around them
    server        the server's rounds         server_app   the Flower ServerApp around them
    errors        what the server is told of a failure at a client
    certificates  TLS certificates and node keys
    private       folders and files that only their owner can read
    folder        the folder that `fedncv federation init` writes
    members       adds, revokes and rotates clients, and renews certificates
    processes     SuperLink and SuperNodes as processes
    keeper        restarts them when they end or get stuck
    node          Flower's SuperNode, on a bad connection
    executor      starts Flower's tasks, without tokens in command lines
    gate          the only access to the server from outside
    admission     decides whom the gate lets through
    coordinator   starts, resumes and stops runs
"""
