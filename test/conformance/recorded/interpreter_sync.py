"""What a user of the Python code interpreter does, without asyncio."""

from e2b_code_interpreter import Sandbox

with Sandbox.create(timeout=300) as box:
    run = box.run_code("x = 41\nprint('printed')\nx + 1")
    assert run.text == "42" and run.logs.stdout == ["printed\n"], run
    assert box.run_code("x * 2").text == "82"
    run = box.run_code("import sys\nprint('e', file=sys.stderr)\n1 / 0")
    assert run.error.name == "ZeroDivisionError" and run.logs.stderr == ["e\n"]
    run = box.run_code("import pandas as pd\npd.DataFrame({'a': [1, 2]})")
    assert run.results[0].html and run.results[0].data, run.results
    context = box.create_code_context(cwd="/tmp", language="python")
    assert box.run_code("import os\nos.getcwd()", context=context).text.strip("'") == "/tmp"
    assert box.run_code("import os\nos.environ['WORD']", envs={"WORD": "given"}).text.strip("'") == "given"
    parts = []
    box.run_code("print(1)", on_stdout=lambda m: parts.append(m.line), on_result=parts.append)
    assert parts == ["1\n"], parts
    box.list_code_contexts()
    box.restart_code_context(context)
    box.remove_code_context(context)
