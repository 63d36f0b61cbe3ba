"""What a user of the Python code interpreter does, with asyncio."""

import asyncio

from e2b_code_interpreter import AsyncSandbox


async def main():
    async with await AsyncSandbox.create(timeout=300) as box:
        run = await box.run_code("print('printed')\n6 * 7")
        assert run.text == "42" and run.logs.stdout == ["printed\n"], run
        context = await box.create_code_context()
        assert (await box.run_code("y = 7\ny", context=context)).text == "7"
        assert (await box.run_code("[1, 2].length", language="javascript")).text == "2"
        run = await box.run_code("undefined_name")
        assert run.error.name == "NameError" and "Traceback" in run.error.traceback


asyncio.run(main())
