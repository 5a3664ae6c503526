"""A package called flash_attn that fails or warns as the real one does."""

import pytest

from infini_llama.tasks.patch_environment.patches.flash_faults import explain

GLIBC = "/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.32' not found (required by flash_attn_2_cuda.so)"
TRY = """
import logging
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
for attempt in range(2):
    try:
        import flash_attn
        print("imported", flash_attn.flash_attn_func)
    except ImportError as error:
        print("refused", error)
"""


@pytest.fixture
def package(tmp_path):
    def write(text: str) -> str:
        folder = tmp_path / "flash_attn"
        folder.mkdir()
        (folder / "__init__.py").write_text(text)
        return f"{tmp_path}:{__import__('os').environ.get('PYTHONPATH', '')}"

    return write


def test_a_linkers_message_becomes_a_sentence_that_is_told_once(run, package):
    path = package(f"raise ImportError({GLIBC!r})")
    without, patched = run(TRY, PYTHONPATH=path), run(TRY, "flash-attn-import", PYTHONPATH=path)
    assert without.stdout.count(f"refused {GLIBC}") == 2 and "glibc" not in without.stdout
    assert patched.stdout.count("refused it was built on a system with glibc 2.32 and this one has") == 2
    assert patched.stderr.count("WARNING flash-attn cannot be imported: it was built on") == 1


def test_warnings_while_it_is_imported_become_one_line(run, package):
    text = "import warnings\nfor i in range(3): warnings.warn(f'custom_fwd {i} is deprecated', FutureWarning)\nflash_attn_func = 7"
    path = package(text)
    without, patched = run(TRY, PYTHONPATH=path), run(TRY, "flash-attn-import", PYTHONPATH=path)
    assert without.stderr.count("FutureWarning:") == 3
    assert patched.stderr.count("deprecated") == 1 and "warned 3 time(s)" in patched.stderr
    assert patched.stdout == without.stdout == "imported 7\n" * 2


def test_flash_attn_4_alone_and_nothing_at_all_stay_what_they_are(run, tmp_path):
    nothing = run(TRY, "flash-attn-import")
    assert nothing.stdout.count("refused No module named 'flash_attn'") == 2 and not nothing.stderr.count("WARNING")
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text("here = 1")
    code = "import flash_attn.cute; print(flash_attn.cute.here, hasattr(flash_attn, 'flash_attn_func'))"
    path = f"{tmp_path}:{__import__('os').environ.get('PYTHONPATH', '')}"
    assert run(code, "flash-attn-import", PYTHONPATH=path).stdout.split() == ["1", "False"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("libcudart.so.11.0: cannot open shared object file", "built for CUDA 11.0"),
        ("flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda", "another torch"),
        ("version `GLIBCXX_3.4.32' not found", "newer C++ library"),
        ("version `GLIBC_2.38' not found", "glibc 2.38"),
        ("something\n  else", "something else"),
    ],
)
def test_each_known_fault_has_its_words(message, words):
    assert words in explain(message) and "\n" not in explain(message)
