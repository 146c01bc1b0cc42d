"""Secure sums: the server learns the sum of the clients' messages, and nothing else about each of them.

    client u    y_u = x_u + PRG(b_u) + sum_v ± PRG(s_uv)   modulo 2^k     x_u: whole numbers (see ``fixed_point``)
    server      sum_u y_u, minus the self masks of those who stayed, minus what the pairwise masks with those who
                dropped out have left       = sum_u x_u, exactly

A round has five stages. Each narrows the clients down to those who answered it:

    keys      a client makes fresh X25519 keys, and signs them with its long-term key
    shares    it deals Shamir shares of its two secrets to its neighbours, sealed with pairwise keys
    masked    it sends its masked vector
    confirm   it signs the list of those whose vectors the server has
    unmask    with enough such signatures, it sends its share of one secret of each neighbour: of the self mask if the
              neighbour stayed, of the mask key if it dropped out; never both

After Bonawitz et al., CCS 2017, https://eprint.iacr.org/2017/281, section 6 (active adversary), with the neighbours of
Bell et al., CCS 2020, https://eprint.iacr.org/2020/704. The code knows neither Flower nor methods: ``client`` and
``server`` are pure functions from state and message to state and answer.

    fixed_point  numbers <-> whole numbers: steps, bounds, and why nothing overflows
    session      what a round is about; its digest is in every key, signature and share
    signatures   the roster of public keys, and signatures by it
    masks        X25519, HKDF and ChaCha20: pairwise and self masks
    shares       Shamir shares of 32 bytes, sealed
    neighbours   who holds shares of whom
    client       a client's answers, and what it refuses
    server       the server's side of a round
"""
