"""Philox in one kernel gives the words of the plain arithmetic, where Triton can run it."""

import pytest
import torch

from fedncv import keys

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("the kernel needs a GPU", allow_module_level=True)


@pytest.mark.parametrize("shape", [(2,), (3, 1, 2), (3, 5, 1, 2), (2, 3, 5, 1, 2)])
def test_words_of_any_shape_are_those_of_the_plain_arithmetic(shape):
    generator = torch.Generator().manual_seed(0)
    key, *counter = (torch.randint(0, 1 << 32, s, generator=generator) for s in (shape, (700,), (1,), (), ()))
    ours = keys.philox(key.cuda(), *(c.cuda() for c in counter))
    assert keys._kernel() is not None
    for a, b in zip(ours, keys.philox(key, *counter), strict=True):
        assert torch.equal(a.cpu(), b)


def test_so_are_draws_under_vmap_and_grad():
    key_K2 = keys.key_for(1, "check", 2, torch.arange(5))

    def slope(x, key):
        return torch.func.grad(lambda y: (y * keys.uniform(keys.fold(key, 3), 4)).sum())(x)

    ours = torch.vmap(slope)(torch.ones(5, 4, dtype=torch.float64).cuda(), key_K2.cuda())
    assert torch.equal(ours.cpu(), torch.stack([keys.uniform(keys.fold(key, 3), 4) for key in key_K2]))
