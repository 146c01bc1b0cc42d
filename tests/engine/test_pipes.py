"""Messages between processes: what arrives is what was sent, in memory of its own."""

import multiprocessing
import threading
from typing import NamedTuple

import pytest
import torch

from fedncv.engine.pipes import receive, repeated, send


class Message(NamedTuple):
    name: str
    tensors: tuple[torch.Tensor, ...]


def passed(message):
    """Return the message at the other end; a thread sends, because a pipe holds less than a large message."""
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        sending = threading.Thread(target=send, args=(ours, message))
        sending.start()
        found = receive(theirs)
        sending.join()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3, 4)], ids=str)
def test_tensors_of_every_type_and_shape_arrive(dtype, shape):
    tensor = torch.randn(shape).to(dtype)
    found = passed(Message("some", (tensor, tensor)))
    assert type(found) is Message
    assert found.name == "some"
    for each in found.tensors:
        assert each.dtype == dtype
        assert torch.equal(each, tensor)


def test_a_large_message_arrives_whole():
    tensor = torch.arange(3_000_000)
    assert torch.equal(passed(tensor), tensor)


@pytest.mark.parametrize("view", [lambda x: x[1], lambda x: x[:, 2], lambda x: x.t(), lambda x: x[:1].expand(7, -1)])
def test_of_a_view_only_its_own_numbers_are_sent(view):
    tensor = view(torch.randn(6, 5))
    found = passed(tensor)
    assert torch.equal(found, tensor)
    assert found.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_what_arrives_begins_where_torch_would_begin_and_may_be_written_to():
    """Kernels may add in another order at another address modulo 64."""
    tensor = torch.randn(101)[1:].requires_grad_()
    found = passed((tensor, tensor[1:]))
    assert all(each.data_ptr() % 64 == 0 and not each.requires_grad for each in found)
    found[0].zero_()
    assert torch.equal(found[1], tensor[1:])


def test_a_pipe_that_ends_within_a_message_says_so():
    ours, theirs = multiprocessing.Pipe()
    sending = threading.Thread(target=lambda: (send(ours, torch.zeros(10)), ours.close()))
    sending.start()
    receive(theirs)
    sending.join()
    with theirs, pytest.raises(EOFError):
        receive(theirs)


def test_a_tensor_of_several_messages_is_sent_once():
    """Also after a new set of messages, in which other tensors are known."""
    ours, theirs = multiprocessing.Pipe()
    shared, memory = torch.randn(3, 4096), []
    models = [shared[1].expand(2, -1), shared[2].expand(2, -1)]
    sizes = []
    for model in models:  # two rounds
        messages = [(u, model[u], torch.full((2,), float(u))) for u in range(2)]
        known = dict.fromkeys(repeated(messages))
        assert len(known) == 1
        for message in messages:
            sending = threading.Thread(target=send, args=(ours, message, known))
            sending.start()
            before = [each.data_ptr() for each in memory]
            u, found, small = receive(theirs, memory)
            sending.join()
            assert torch.equal(found, model[u])
            assert torch.equal(small, message[2])
            sizes.append(found.data_ptr() in before)
    assert sizes == [False, True, False, True]
    ours.close()
    theirs.close()


def test_views_of_one_memory_that_differ_are_not_taken_for_each_other():
    x = torch.randn(64, 64)
    messages = [(x, x.t(), x[:32]), (x, x.t(), x[:32])]
    known, memory = dict.fromkeys(repeated(messages)), []
    assert len(known) == 3
    ours, theirs = multiprocessing.Pipe()
    for message in messages:
        sending = threading.Thread(target=send, args=(ours, message, known))
        sending.start()
        assert all(map(torch.equal, receive(theirs, memory), message))
        sending.join()
    assert len(memory) == 3
    ours.close()
    theirs.close()
