"""Compare two methods in under ten lines: the built-in digits among 20 clients, with the same draws for both."""

import fedncv

for method in ("fedavg", "fedper"):
    result = fedncv.simulate(method=method, model="mlp", clients=20, per_round=5, rounds=10, lr=0.05)
    last = result.last
    print(f"{method:8} before {last['before']:.3f}  after {last['after']:.3f}  {last['bytes_up']:,} bytes up")
