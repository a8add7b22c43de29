"""What goes into a slab comes out of it, for every type of elements, and with its checksum."""

from typing import Any, get_args

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engines.transfer.port import (
    PIECE,
    HostMemory,
    Memory,
    TensorMemory,
    checksum,
    copy_checked,
    form_of,
)
from headwater.schemas.media import DType, LocalPlace, Offer
from tests.support.marks import TORCH

TYPES = get_args(DType)


def offer_of(array: Any, checksum: int, dtype: DType | None = None) -> Offer:
    """What an owner would send."""
    form = form_of(array, dtype)
    place = LocalPlace("a", 0)
    return Offer(bytes(16), "a", 1, form.dtype, form.shape, form.nbytes, checksum, 0, place)


def round_trip(memory: Memory, array: Any, dtype: DType | None = None) -> Any:
    """In at 4096 and out again."""
    offer = offer_of(array, memory.put(4096, array), dtype)
    got, seen = memory.get(4096, offer)
    lent, seen_there = memory.lend(4096, offer)
    assert seen == seen_there == offer.checksum
    assert (lent.dtype, lent.shape) == (got.dtype, got.shape)
    assert (lent == got).all()
    return got


@pytest.mark.parametrize("name", [name for name in TYPES if name != "bfloat16"])
def test_arrays_come_back(name: DType) -> None:
    """Type, shape and bytes, from contiguous and strided arrays of either byte order, down to no dimension."""
    memory = HostMemory(1 << 16)
    array = np.arange(240).reshape(4, 6, 10).astype(name)
    for given_ in (
        array,
        array[::2, ::-1],
        array.T,
        array.astype(array.dtype.newbyteorder(">")),
        array[0, 0, 1],
    ):
        given_ = np.asarray(given_)
        got = round_trip(memory, given_)
        assert (got.dtype, got.shape) == (array.dtype, given_.shape)
        assert np.array_equal(got, given_)


def test_a_copy_is_our_own() -> None:
    """The slab goes to others afterwards."""
    memory = HostMemory(1 << 16)
    got = round_trip(memory, np.arange(100))
    memory.view(0, 1 << 16)[:] = 7
    assert np.array_equal(got, np.arange(100))


@TORCH
def test_bfloat16_travels_as_its_bits() -> None:
    """Numpy has no such type: uint16 in, with its name, and uint16 out; torch has it."""
    torch = pytest.importorskip("torch")
    values = torch.arange(64, dtype=torch.bfloat16).reshape(8, 8) / 3
    tensors, host = TensorMemory(torch.zeros(1 << 16, dtype=torch.uint8)), HostMemory(1 << 16)
    assert torch.equal(round_trip(tensors, values), values)
    bits = values.view(torch.uint16).numpy()
    offer = offer_of(bits, host.put(0, bits), "bfloat16")
    assert (offer.dtype, offer.nbytes, offer.checksum) == ("bfloat16", 128, tensors.put(0, values))
    assert np.array_equal(host.get(0, offer)[0], bits)


@TORCH
@pytest.mark.parametrize("name", ["bool", "uint8", "int64", "float16", "float32"])
def test_tensors_come_back(name: str) -> None:
    """Contiguous or not; numpy arrays may go into a tensor too, and the checksums of both are one."""
    torch = pytest.importorskip("torch")
    memory = TensorMemory(torch.zeros(1 << 16, dtype=torch.uint8))
    assert (memory.kind, memory.device) == ("DRAM", 0)
    tensor = torch.arange(60).reshape(3, 4, 5).to(getattr(torch, name))
    for given_ in (tensor, tensor.transpose(0, 2)):
        assert torch.equal(round_trip(memory, given_), given_)
    assert memory.put(0, tensor.numpy()) == HostMemory(4096).put(0, tensor.numpy())
    assert torch.equal(memory.get(0, offer_of(tensor, 0))[0], tensor)


@TORCH
def test_a_tensor_slab_is_flat_bytes() -> None:
    """Anything else is refused."""
    torch = pytest.importorskip("torch")
    for wrong in (torch.zeros(16), torch.zeros((4, 4), dtype=torch.uint8)):
        with pytest.raises(ValueError, match="one-dimensional"):
            TensorMemory(wrong)


def test_what_can_not_be_offered_is_refused() -> None:
    """Empty, of objects, or not what its name says."""
    with pytest.raises(ValueError, match="nothing to transfer"):
        form_of(np.empty((3, 0)), None)
    with pytest.raises(ValueError, match="type object cannot be transferred"):
        form_of(np.array([None]), None)
    with pytest.raises(ValueError, match=r"4 bytes .* cannot be bfloat16"):
        form_of(np.zeros(3, np.float32), "bfloat16")


@given(extra=st.integers(-2, 2), pieces=st.integers(0, 2), seed=st.integers(0, 9))
@settings(max_examples=20)
def test_the_checksum_is_that_of_the_whole_however_it_is_copied(extra: int, pieces: int, seed: int) -> None:
    """XXH3-64, around the borders of pieces; one changed bit changes it."""
    source = np.random.default_rng(seed).integers(0, 256, max(1, pieces * PIECE + extra), dtype=np.uint8)
    into = np.zeros_like(source)
    sum_ = copy_checked(into, source)
    assert np.array_equal(into, source)
    assert sum_ == checksum(source) == xxhash.xxh3_64_intdigest(source.tobytes())
    into[into.size // 2] ^= 1
    assert checksum(into) != sum_
