"""Cache folders are the user's alone: 0700 whatever the umask, and none that others own or can write."""

import os
import subprocess
import sys
import warnings

import pytest

from ppl_bandit.runtime.archive import _warn, make_private, refusal


@pytest.fixture
def umask():
    before = os.umask(0)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o077, 0o277])
def test_every_missing_folder_is_made_for_the_user_alone(tmp_path, umask, mask):
    tmp_path.chmod(0o700)
    umask(mask)
    assert make_private(tmp_path / "a" / "b" / "c")
    for name in ("a", "a/b", "a/b/c"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702, 0o1777])
def test_a_folder_that_others_can_write_is_not_used_and_one_warning_says_so(tmp_path, mode):
    place = tmp_path / f"{mode:o}"
    place.mkdir()
    place.chmod(mode)
    with pytest.warns(UserWarning, match="other users can write .*chmod go-w"):
        assert not make_private(place)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not make_private(place)
    inner = place / "inner"
    inner.mkdir(mode=0o700)
    assert bool(refusal(inner)) == (mode != 0o1777)  # in /tmp nobody replaces what belongs to another user


def test_a_link_is_judged_by_what_it_leads_to(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    assert "can write" in refusal(tmp_path / "link")


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root gives folders away")
def test_a_folder_of_another_user_is_not_used(tmp_path):
    for name in ("own", "parent/inner"):
        (tmp_path / name).mkdir(parents=True, mode=0o700)
    os.chown(tmp_path / "own", 12345, 12345)
    os.chown(tmp_path / "parent", 12345, 12345)
    assert "belongs to another user" in refusal(tmp_path / "own")
    assert "belongs to another user" in refusal(tmp_path / "parent/inner")
    _warn.cache_clear()


@pytest.mark.parametrize("given", ["JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"])
@pytest.mark.parametrize("mode", [0o777, 0o700])
def test_jax_caches_only_where_nobody_else_writes(tmp_path, given, mode):
    place = tmp_path / "cache"
    place.mkdir()
    place.chmod(mode)
    environment = {
        key: value for key, value in os.environ.items() if key not in ("JAX_COMPILATION_CACHE_DIR", "PPL_BANDIT_CACHE")
    }
    code = "import jax, ppl_bandit.runtime.xla_options; print(jax.config.jax_compilation_cache_dir)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment | {given: str(place)}, capture_output=True, text=True, check=True
    )
    if mode == 0o777:
        assert done.stdout.strip() == "None" and done.stderr.count("is not used: other users can write") == 1
    else:
        assert done.stdout.startswith(str(place)) and not done.stderr
        for folder in (place, *place.rglob("*")):
            assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_is_set_after_the_import_is_judged_before_anything_is_compiled(tmp_path):
    place = tmp_path / "cache"
    place.mkdir()
    place.chmod(0o777)
    code = f"""
import os, jax, ppl_bandit.runtime.artefact as cache
jax.config.update("jax_compilation_cache_dir", {str(place)!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.jit(lambda x: x + 1)(1.0)  # JAX has opened the folder
files = lambda: len(os.listdir({str(place)!r}))
before = files()
assert before and cache.folder() is None and cache.folder() is None
jax.jit(lambda x: x + 2)(1.0)
print(jax.config.jax_compilation_cache_dir, files() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None 0" and done.stderr.count("is not used: other users can write") == 1
