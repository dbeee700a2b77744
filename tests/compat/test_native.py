"""``native.c``: what it hands on to the functions that launch kernels and GEMMs."""

import ctypes
import importlib.util
import shutil
import struct
import subprocess
import sysconfig

import pytest
import torch

from nemo_lowprec.compat import native as compat

CC = shutil.which("cc") or shutil.which("gcc")
pointer = ctypes.c_void_p


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    if CC is None:
        pytest.skip("needs a C compiler")
    built = tmp_path_factory.mktemp("native") / f"{compat.NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    headers = sysconfig.get_paths()["include"]
    subprocess.run(
        [CC, "-O2", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{headers}", compat.SOURCE, "-o", built], check=True
    )
    spec = importlib.util.spec_from_file_location(compat.NAME, built)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Launched:
    """In the place of ``cuLaunchKernel``: keeps what it was called with."""

    def __init__(self, sizes, status=0):
        self.calls = []
        types = [ctypes.c_int, pointer, *[ctypes.c_uint] * 7, pointer, ctypes.POINTER(pointer), pointer]

        def launch(kernel, *rest):
            *numbers, stream, arguments, extra = rest
            values = [ctypes.string_at(arguments[i], size) for i, size in enumerate(sizes)]
            self.calls.append((kernel, numbers, stream, values, extra))
            return status

        self.function = ctypes.CFUNCTYPE(*types)(launch)

    def kernel(self, native, kinds):
        return native.new_kernel(compat.address(self.function), 77, 128, 4096, kinds)


def test_arguments_of_a_kernel_are_laid_out_as_c_has_them(native):
    launched = Launched([8, 8, 8, 4, 8, 4, 8, 8])
    x = torch.arange(4)
    kernel = launched.kernel(native, "pppi-lf")
    assert native.launch(kernel, 5, 99, x, x.data_ptr() + 8, None, -3, "a constant", -(2**40), 0.1) is None
    ((function, numbers, stream, values, extra),) = launched.calls
    assert (function, numbers, stream, extra) == (77, [5, 1, 1, 128, 1, 1, 4096], 99, None)
    addresses = [struct.unpack("Q", values[i])[0] for i in (0, 1, 2, 6, 7)]
    assert addresses == [x.data_ptr(), x.data_ptr() + 8, 0, 0, 0]
    assert struct.unpack("i", values[3]) == (-3,) and struct.unpack("q", values[4]) == (-(2**40),)
    assert struct.unpack("f", values[5])[0] == torch.tensor(0.1).item()


def test_an_empty_grid_is_not_launched(native):
    launched = Launched([])
    native.launch(launched.kernel(native, "i"), 0, 0, 1)
    assert not launched.calls


def test_calls_that_cannot_be_are_errors(native):
    launched = Launched([])
    kernel = launched.kernel(native, "pi")
    with pytest.raises(TypeError, match="1 arguments in the place of 2"):
        native.launch(kernel, 1, 0, None)
    with pytest.raises(AttributeError, match="data_ptr"):
        native.launch(kernel, 1, 0, "no tensor", 1)
    with pytest.raises(TypeError):
        native.launch(kernel, 1, 0, None, "no number")
    with pytest.raises(TypeError, match="a kernel is missing"):
        native.launch()
    with pytest.raises(ValueError):
        native.launch("no kernel", 1, 0)
    with pytest.raises(ValueError, match="a kernel of 60 arguments"):
        launched.kernel(native, "p" * 60)
    assert not launched.calls
    with pytest.raises(RuntimeError, match="cuLaunchKernel has failed with status 700"):
        native.launch(Launched([], 700).kernel(native, ""), 1, 0)


class Multiplied:
    """In the place of ``cublasLtMatmul`` and ``cublasLtMatmulDescSetAttribute``."""

    def __init__(self, status=0):
        self.set, self.calls = {}, []
        types = [ctypes.c_int, *[pointer] * 14, ctypes.c_size_t, pointer]

        def matmul(handle, description, alpha, a, la, b, lb, beta, c, lc, out, lo, algorithm, memory, size, stream):
            factors = [ctypes.c_float.from_address(each).value for each in (alpha, beta)]
            option = ctypes.string_at(algorithm, 64)
            self.calls.append(
                ((handle, description, a, la, b, lb, c, lc, out, lo, memory, size, stream), factors, option)
            )
            return status

        def set_attribute(description, attribute, value, size):
            self.set[attribute] = (description, ctypes.c_uint64.from_address(value).value, size)
            return 0

        self.matmul = ctypes.CFUNCTYPE(*types)(matmul)
        self.set_attribute = ctypes.CFUNCTYPE(ctypes.c_int, pointer, ctypes.c_int, pointer, ctypes.c_size_t)(
            set_attribute
        )

    def gemm(self, native):
        algorithm = ctypes.create_string_buffer(bytes(range(64)), 64)
        functions = compat.address(self.matmul), compat.address(self.set_attribute)
        return native.new_gemm(*functions, 1, 2, 3, 4, 5, ctypes.addressof(algorithm), 1024)


@pytest.mark.parametrize("bias", [None, 48])
@pytest.mark.parametrize("adds", [False, True])
def test_a_gemm_hands_on_its_operands(native, bias, adds):
    made = Multiplied()
    scale = torch.ones(2)
    assert native.gemm(made.gemm(native), 16, 32, scale[:1], scale[1:], bias, 64, adds, 80, 96) == 0
    ((objects, factors, algorithm),) = made.calls
    assert objects == (1, 2, 32, 3, 16, 4, 64, 5, 64, 5, 80, 1024, 96)
    assert factors == [1.0, float(adds)] and algorithm == bytes(range(64))
    wanted = {17: scale.data_ptr() + 4, 18: scale.data_ptr(), **({} if bias is None else {8: bias})}
    assert made.set == {attribute: (2, value, 8) for attribute, value in wanted.items()}


def test_a_gemm_returns_the_status_of_the_library(native):
    call = 16, 32, 48, 64, None, 80, False, 0, 0
    assert native.gemm(Multiplied(status=7).gemm(native), *call) == 7
    with pytest.raises(TypeError, match="3 arguments in the place of 10"):
        native.gemm(Multiplied().gemm(native), 1, 2)
    made = Multiplied()
    with pytest.raises(AttributeError):
        native.gemm(made.gemm(native), "no address", *call[1:])
    assert not made.calls


def test_without_a_compiler_there_is_none(monkeypatch, caplog):
    monkeypatch.setattr(compat, "SOURCE", compat.SOURCE.with_name("not_there.c"))
    compat.native.cache_clear()
    with caplog.at_level("INFO"):
        assert compat.native() is None
    assert "not_there.c was not compiled" in caplog.text
    compat.native.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_triton_compiles_it():
    assert compat.native() is not None and compat.launch_address()
