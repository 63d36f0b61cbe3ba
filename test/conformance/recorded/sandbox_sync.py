"""What a user of the Python SDK does with a sandbox, without asyncio."""

import time

from e2b import Sandbox

with Sandbox.create(timeout=300, metadata={"made by": "python & co"}, envs={"GREETING": "hi"}) as box:
    assert box.is_running()
    run = box.commands.run("echo $GREETING; echo err >&2; pwd; whoami")
    assert (run.stdout, run.stderr, run.exit_code) == ("hi\n/home/user\nuser\n", "err\n", 0)
    try:
        box.commands.run("exit 3", cwd="/tmp", user="root", timeout=10)
        raise AssertionError("exit 3 did not raise")
    except Exception as err:
        assert err.exit_code == 3, err

    info = box.files.write("dir/a.txt", "some text")
    assert info.path == "/home/user/dir/a.txt"
    assert box.files.read("dir/a.txt") == "some text"
    assert bytes(box.files.read("dir/a.txt", format="bytes")) == b"some text"
    box.files.write_files([{"path": "dir/b", "data": b"\x00\xff"}, {"path": "dir/c", "data": "c"}])
    assert sorted(e.name for e in box.files.list("dir")) == ["a.txt", "b", "c"]
    assert box.files.get_info("dir/a.txt").size == 9
    assert box.files.make_dir("dir/new") and not box.files.make_dir("dir/new")
    box.files.rename("dir/c", "dir/d")
    assert box.files.exists("dir/d") and not box.files.exists("dir/c")
    box.files.remove("dir/d")
    try:
        box.files.read("dir/d")
        raise AssertionError("the removed file is there")
    except Exception as err:
        assert type(err).__name__ in ("NotFoundException", "FileNotFoundException"), type(err)

    watch = box.files.watch_dir("dir")
    box.files.write("dir/watched", "x")
    time.sleep(0.5)
    assert "watched" in [e.name for e in watch.get_new_events()]
    watch.stop()

    cat = box.commands.run("cat", background=True, stdin=True)
    box.commands.send_stdin(cat.pid, "typed\n")
    time.sleep(0.5)
    assert cat.pid in [p.pid for p in box.commands.list()]
    assert box.commands.kill(cat.pid)

    assert box.get_info().metadata == {"made by": "python & co"}
    pages = Sandbox.list(limit=5)
    assert box.sandbox_id in [s.sandbox_id for s in pages.next_items()]
    box.set_timeout(200)
    box.pause()
    box.connect()
    assert box.files.read("dir/a.txt") == "some text"
    fork = box.fork()[0]
    fork = getattr(fork, "sandbox", fork)
    assert fork.files.read("dir/a.txt") == "some text"
    fork.kill()
    assert box.kill()
    assert not box.is_running()
