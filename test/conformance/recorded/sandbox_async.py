"""What a user of the Python SDK does with a sandbox, with asyncio."""

import asyncio

from e2b import AsyncSandbox, PtySize


async def main():
    async with await AsyncSandbox.create(timeout=300) as box:
        lines = []
        run = await box.commands.run("for i in 1 2 3; do echo $i; sleep 0.3; done", background=True, on_stdout=lines.append)
        assert (await run.wait()).stdout == "1\n2\n3\n" and "".join(lines) == "1\n2\n3\n"
        await box.files.write("a.txt", "some text")
        assert await box.files.read("a.txt") == "some text"
        assert [c async for c in await box.files.read("a.txt", format="stream")] == [b"some text"]
        seen = asyncio.Event()
        watch = await box.files.watch_dir(".", on_event=lambda e: seen.set() if e.name == "watched" else None, recursive=True)
        await box.files.write("watched", "x")
        await asyncio.wait_for(seen.wait(), 10)
        await watch.stop()
        out = asyncio.Queue()

        async def on_data(b):
            await out.put(b)

        pty = await box.pty.create(PtySize(rows=24, cols=80), on_data=on_data)
        await box.pty.resize(pty.pid, PtySize(rows=30, cols=100))
        await box.pty.send_stdin(pty.pid, b"stty size; exit 5\n")
        try:
            await pty.wait()
        except Exception as err:
            assert err.exit_code == 5, err
        runs = await asyncio.gather(*(box.commands.run(f"echo {n}") for n in range(3)))
        assert [r.stdout for r in runs] == ["0\n", "1\n", "2\n"]
        assert await box.kill()


asyncio.run(main())
