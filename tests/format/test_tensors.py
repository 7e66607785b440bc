"""Dtypes, tables and rounding."""

import ml_dtypes
import numpy as np
import pytest
from cases import VALUE_DTYPES, Bag

import weightcast as wc
from weightcast.errors import UsageError, VersionError
from weightcast.format.spec import DTYPES
from weightcast.format.tensors import bits_of


def test_every_safetensors_dtype_is_known() -> None:
    """The library's own error message lists its dtypes."""
    import safetensors

    header = b'{"a":{"dtype":"NONE","shape":[],"data_offsets":[0,0]}}'
    with pytest.raises(safetensors.SafetensorError) as error:
        safetensors.deserialize(len(header).to_bytes(8, "little") + header)
    listed = str(error.value).split("expected one of ")[1].split("` at")[0]
    assert [name.strip("` ") for name in listed.split(",")] == list(DTYPES)


def test_elements_of_packed_dtypes_are_bytes() -> None:
    assert wc.TensorSpec("w", "F4", (3, 6)).elements == 9
    assert wc.TensorSpec("w", "F6_E2M3", (4,)).elements == 3
    with pytest.raises(UsageError, match="whole bytes"):
        _ = wc.TensorSpec("w", "F4", (3,)).nbytes


def test_scalars_and_empty_tensors_have_sizes() -> None:
    assert wc.TensorSpec("w", "F32", ()).elements == 1
    assert wc.TensorSpec("w", "F32", (0, 7)).elements == 0


def test_table_is_sorted_by_bytes_and_knows_its_tensors() -> None:
    table = wc.TensorTable.of(wc.TensorSpec(name, "U8", (1,)) for name in ("é", "b", "a", "Z"))
    assert [spec.name for spec in table] == ["Z", "a", "b", "é"]
    assert table.ordinal("b") == 2
    assert "c" not in table


def test_table_refuses_a_name_twice_and_an_alias_of_nothing() -> None:
    spec = wc.TensorSpec("w", "U8", (1,))
    with pytest.raises(UsageError, match="two tensors have the same name"):
        wc.TensorTable.of([spec, spec])
    with pytest.raises(UsageError, match="alias 'tied' of an unknown tensor"):
        wc.TensorTable.of([spec], {"tied": "v"})
    assert wc.TensorTable.of([spec], {"tied": "w"}).aliases == (("tied", "w"),)


def test_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(VersionError, match="unknown dtype 'F7'"):
        _ = wc.TensorSpec("w", "F7", (1,)).elements


@pytest.mark.parametrize("dtype", VALUE_DTYPES)
def test_arrays_take_every_dtype_by_its_bits(dtype: str) -> None:
    bits = np.arange(6, dtype=DTYPES[dtype].word)
    weights = wc.Arrays({"w": bits.reshape(2, 3)}, {"w": dtype})
    assert weights.table["w"] == wc.TensorSpec("w", dtype, (2, 3))
    assert np.array_equal(weights.read("w"), bits)


def test_arrays_know_the_dtypes_that_numpy_and_ml_dtypes_name() -> None:
    kinds = [np.bool_, np.int8, np.uint64, np.float16, np.complex64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
    weights = wc.Arrays({np.dtype(kind).name: np.zeros(2, kind) for kind in kinds})
    assert {spec.dtype for spec in weights.table} == {"BOOL", "I8", "U64", "F16", "C64", "BF16", "F8_E4M3"}


def test_arrays_refuse_what_has_no_bits() -> None:
    with pytest.raises(UsageError):
        wc.Arrays({"w": np.array(["text"])})
    with pytest.raises(UsageError, match="contiguous"):
        wc.Arrays({"w": np.zeros((4, 4), np.float32).T[1:]})
    with pytest.raises(UsageError, match="not supported"):
        wc.Arrays({"w": np.zeros(4, ">f4")})
    with pytest.raises(UsageError, match="expected a numpy array, got list"):
        wc.Arrays({"w": [1.0]})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="does not exist"):
        wc.Arrays({"w": np.zeros(4, np.uint16)}, {"v": "BF16"})
    with pytest.raises(UsageError, match="float32 cannot hold BF16"):
        wc.Arrays({"w": np.zeros(4, np.float32)}, {"w": "BF16"})


def test_arrays_know_the_other_names_of_tied_tensors() -> None:
    weights = wc.Arrays({"embed": np.zeros(4, np.float32)}, aliases={"head": "embed"})
    assert weights.table.aliases == (("head", "embed"),)


def test_copy_shares_nothing_with_its_original() -> None:
    original = wc.Arrays({"w": np.arange(6, dtype=np.uint16).reshape(2, 3)}, {"w": "BF16"}, {"tied": "w"})
    copy = wc.Arrays.copy_of(original)
    assert copy.table == original.table
    copy.read("w")[0] = 9
    assert original.read("w").tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(UsageError, match="F4 cannot be held in an array of its shape"):
        wc.Arrays.copy_of(Bag({wc.TensorSpec("p", "F4", (4,)): np.zeros(2, np.uint8)}))


def test_bits_are_the_arrays_own_memory() -> None:
    array = np.zeros(3, np.float32)
    bits_of(array)[1] = 0x3F800000
    assert array[1] == 1.0


# -- rounding (SPEC 3) -----------------------------------------------------------------------------------------------


def _every_kind_of_float32() -> np.ndarray:
    rng = np.random.default_rng(0)
    tops = np.arange(1 << 16, dtype=np.uint32) << 16
    edges = [tops | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    halves = [(np.arange(1 << 19, dtype=np.uint32) << 13) | low for low in (0, 0x0FFF, 0x1000, 0x1001)]
    return np.concatenate([*edges, *halves, rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32)]).view(np.float32)


@pytest.mark.parametrize(("dtype", "kind"), [("BF16", ml_dtypes.bfloat16), ("F16", np.float16)])
def test_rounding_is_to_nearest_even_3_1(dtype: str, kind: type) -> None:
    values = _every_kind_of_float32()
    numbers = values[~np.isnan(values)]
    with np.errstate(over="ignore"):
        expected = numbers.astype(kind).view(np.uint16)
    assert np.array_equal(wc.round_to(dtype, numbers), expected)


@pytest.mark.parametrize(("dtype", "canonical"), [("BF16", 0x7FC0), ("F16", 0x7E00)])
def test_every_nan_rounds_to_one_nan_3_2(dtype: str, canonical: int) -> None:
    values = _every_kind_of_float32()
    assert set(wc.round_to(dtype, values[np.isnan(values)])) == {canonical}


def test_rounding_equals_torch_on_numbers() -> None:
    import torch

    values = _every_kind_of_float32()
    numbers = values[~np.isnan(values)]
    expected = torch.from_numpy(numbers).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(wc.round_to("BF16", numbers), expected)


def test_rounding_keeps_the_shape_and_refuses_other_dtypes() -> None:
    assert wc.round_to("BF16", np.zeros((2, 3), np.float32)).shape == (2, 3)
    with pytest.raises(UsageError):
        wc.round_to("F32", np.zeros(1, np.float32))
    with pytest.raises(UsageError):
        wc.round_to("BF16", np.zeros(1, np.float64))
