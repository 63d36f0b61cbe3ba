"""What a user of the Python SDK does to build a template, with asyncio."""

import asyncio

from e2b import AsyncSandbox, AsyncTemplate


async def main():
    template = AsyncTemplate().from_template("base").run_cmd("echo made >/tmp/made")
    build = await AsyncTemplate.build_in_background(template, "python-async")
    while (await AsyncTemplate.get_build_status(build)).status.value in ("building", "waiting"):
        await asyncio.sleep(0.2)
    async with await AsyncSandbox.create("python-async", timeout=120) as box:
        assert await box.files.read("/tmp/made") == "made\n"


asyncio.run(main())
