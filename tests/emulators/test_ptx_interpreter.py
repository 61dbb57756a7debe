"""The interpreter computes as PTX's manual says, and refuses as a GPU does."""

import numpy as np
import pytest
from ptx_interpreter import Fault, Memory, Unknown, launch, parse

OUT, DATA = 0x7F00_0000_0000, 1 << 40
HEADER = """
.visible .entry kernel(
	.param .u64 kernel_param_0,
	.param .u64 kernel_param_1
)
.maxntid 64, 1, 1
{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b16 	%h<9>;
	.reg .b32 	%r<9>;
	.reg .f32 	%f<9>;
	.reg .b64 	%rd<9>;
	ld.param.u64 	%rd1, [kernel_param_0];
	ld.param.u64 	%rd2, [kernel_param_1];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd3, %r1, 4;
	add.s64 	%rd4, %rd1, %rd3;
"""


def result(code, threads=4, data=b"", blocks=(0,)):
    """Return the words that threads store at %rd4, which is at 4 * %tid.x."""
    kernel = parse(f"{HEADER}{code.replace('; ', ';' + chr(10))};\nret;\n}}")
    ranges = {OUT: np.zeros(4 * threads, np.uint8)}
    if data:
        ranges[DATA] = np.frombuffer(data, np.uint8)
    memory = Memory(ranges, writable={OUT})
    launch(kernel, memory, [OUT, DATA], blocks, threads)
    return memory.bytes_at(OUT).view(np.uint32)


STORE = "; st.global.u32 [%rd4], %r2"
WORDS = "mov.u32 %r3, 305419896; mov.u32 %r4, -2130606072; "  # 0x12345678, 0x81018808


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("prmt.b32 %r2, %r3, %r4, 4180", 0x56788808),
        ("prmt.b32 %r2, %r3, %r4, 36111", 0x00FF78FF),  # signs where a digit is 8 or more
        ("shl.b32 %r2, %r3, 32", 0),
        ("shr.u32 %r2, %r3, 28", 1),
        ("shr.s32 %r2, %r4, 99", 0xFFFFFFFF),
        ("bfe.u32 %r2, %r3, 8, 12", 0x456),
        ("min.u32 %r2, %r4, 5", 5),
        ("min.s32 %r2, %r4, 5", 0x81018808),
        ("div.s32 %r2, -7, 2", 0xFFFFFFFD),
        ("rem.s32 %r2, -7, 2", 0xFFFFFFFF),
        ("mad.lo.s32 %r2, %r3, 2, 1", 0x2468ACF1),
        ("mov.b32 {%rs1, %rs2}, %r3; mov.b32 %r2, {%rs2, %rs1}", 0x56781234),
        ("cvt.u16.u32 %rs1, %r4; cvt.s32.s16 %r2, %rs1", 0xFFFF8808),
        ("setp.lt.s32 %p1, %r4, 0; selp.b32 %r2, 7, 8, %p1", 7),
        ("mov.f32 %f1, 0f3F801000; cvt.rn.f16.f32 %h1, %f1; mov.b32 %r2, {%h1, %h1}", 0x3C003C00),
        ("mov.f32 %f1, 0fFFC00001; mul.rn.f32 %f2, %f1, %f1; mov.b32 %r2, %f2", 0x7FFFFFFF),
        ("mov.f32 %f1, 0f00000001; add.rn.f32 %f2, %f1, %f1; mov.b32 %r2, %f2", 2),
        ("mov.f32 %f1, 0f7FC00000; setp.nan.f32 %p1, %f1, %f1; selp.b32 %r2, 1, 2, %p1", 1),
    ],
)
def test_an_instruction(code, expected):
    assert result(WORDS + code + STORE).tolist() == [expected] * 4


@pytest.mark.parametrize("a", [0, 1, 2**32 - 1, 2**63 + 12345, 2**64 - 1])
@pytest.mark.parametrize("b", [1, 2**32 + 1, 0x0123456789ABCDEF, 2**64 - 1])
def test_the_upper_half_of_a_product(a, b):
    code = f"mov.u64 %rd5, {a}; mul.hi.u64 %rd6, %rd5, {b}; shr.u64 %rd7, %rd6, 32; "
    assert result(code + "cvt.u32.u64 %r2, %rd7" + STORE)[0] == a * b >> 96
    assert result(code + "cvt.u32.u64 %r2, %rd6" + STORE)[0] == (a * b >> 64) % 2**32


LOOP = """
mov.u32 %r2, 0;
setp.ge.u32 %p1, %r1, 6;
@%p1 bra $L_end;
$L_again:
add.s32 %r2, %r2, 1;
setp.le.u32 %p2, %r2, %r1;
@%p2 bra $L_again;
$L_end:
st.global.u32 [%rd4], %r2"""


def test_threads_may_diverge_and_come_together_again():
    assert result(LOOP, threads=8).tolist() == [1, 2, 3, 4, 5, 6, 0, 0]


def test_a_line_may_have_a_register_of_its_own():
    line = "{ .reg .b16 tmp; mov.b32 {tmp, %rs1}, %r1; }\n"
    kernel = parse(f"{HEADER}{line}st.global.u16 [%rd4], %rs1;\nret;\n}}")
    memory = Memory({OUT: np.full(4, 7, np.uint8)}, writable={OUT})
    launch(kernel, memory, [OUT, 0], [0], 1)
    assert memory.bytes_at(OUT).tolist() == [0, 0, 7, 7]


def test_a_load_has_the_words_of_a_vector_and_a_sign():
    data = np.arange(8, dtype=np.uint32).tobytes() + b"\xfe\x00\x00\x00"
    code = "ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%rd2+16]; mov.u32 %r2, %r6"
    assert result(code + STORE, data=data).tolist() == [5] * 4
    code = "ld.global.s8 %rs1, [%rd2+32]; cvt.u32.u16 %r2, %rs1"
    assert result(code + STORE, data=data).tolist() == [0xFFFE] * 4


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        ("ld.global.u32 %r2, [%rd2+2]", Fault, r"misaligned address .* for 4 bytes: ld\.global"),
        ("ld.global.u32 %r2, [%rd2+4]", Fault, "no memory at .* for 4 bytes"),
        ("ld.global.u32 %r2, [%rd2+-4]", Fault, "no memory at .* for 4"),
        ("st.global.u32 [%rd2], %r1", Fault, "read-only"),
        ("div.u32 %r2, %r1, 0", Fault, "division by zero"),
        ("ld.shared.u32 %r2, [%rd2]", Unknown, r"kind of memory .*: ld\.shared"),
        ("bar.sync 0", Unknown, r"lacks: bar\.sync"),
        ("mul.rn.ftz.f32 %f1, %f1, %f1", Unknown, "mode .* lacks: mul.rn.ftz"),
        ("mov.u32 %r2, %r3", Unknown, "%r3 has no value"),
        ("mov.u32 %rd5, %r1", Unknown, "%rd5 is not uint32"),
        ("add.s64 %rd5, %r1, 1", Unknown, "%r1 is not s64"),
        ("mov.u32 %q1, 1", Unknown, "%q1 is not declared"),
    ],
)
def test_a_wrong_or_unknown_instruction_raises_with_its_line(code, error, text):
    with pytest.raises(error, match=text):
        result(code, data=bytes(4))


def test_more_threads_than_the_kernel_allows_are_refused():
    with pytest.raises(Fault, match="65 threads"):
        result("mov.u32 %r2, 0", threads=65)


def test_each_store_is_counted():
    kernel = parse("\n".join([HEADER, "st.global.u32 [%rd1], %r1;", "ret;", "}"]))
    memory = Memory({OUT: np.zeros(8, np.uint8)}, writable={OUT})
    launch(kernel, memory, [OUT, 0], [0, 1], 3)
    assert memory.stores_at(OUT).tolist() == [6] * 4 + [0] * 4
