"""A real federation: the same methods between machines that share no data, over Flower.

This package only translates: a client's half of a round is ``engine.local.train``, the server's half is
``engine.round.settle``, so the numbers are the sequential engine's, bit for bit.

    wire          trees of tensors <-> Flower's records; nothing that does not fit is decoded
    samples       a client's data folder
    halves        the problem as the server sees it (no data) and as a client sees it (only its own)
    own           what a client keeps between rounds, on its disk
    rules         what the server accepts: time, sizes, norms
    client        a client's answers          client_app   the Flower ClientApp around them
    server        the server's rounds         server_app   the Flower ServerApp around them
    certificates  TLS certificates and node keys
    folder        the folder that `fedncv federation init` writes
    processes     SuperLink and SuperNodes as processes      keeper   starts them again when they end
    gate          the only door to the server from outside
    coordinator   starts runs, and starts them again where they stopped
"""
