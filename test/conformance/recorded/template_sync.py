"""What a user of the Python SDK does to build a template, without asyncio."""

import os
import tempfile

from e2b import Sandbox, Template, wait_for_file

with tempfile.TemporaryDirectory() as context:
    with open(os.path.join(context, "file.txt"), "w") as f:
        f.write("copied\n")
    os.utime(os.path.join(context, "file.txt"), (0, 0))
    template = (
        Template(file_context_path=context)
        .from_template("base")
        .set_envs({"WORD": "said"})
        .set_workdir("/app")
        .copy("file.txt", "here.txt", mode=0o600)
        .run_cmd("echo $WORD >out.txt")
        .make_dir("dir")
        .set_user("user")
        .set_start_cmd("touch /tmp/started; sleep 1000", wait_for_file("/tmp/started"))
    )
    lines = []
    build = Template.build(template, "python-sync:v1", tags=["stable"], cpu_count=1, memory_mb=512, on_build_logs=lines.append)
    assert any("ENV WORD said" in line.message for line in lines), [line.message for line in lines]

assert Template.exists("python-sync") and not Template.exists("python-none")
assert Template.get_build_status(build).status.value == "ready"
Template.assign_tags("python-sync:v1", ["production"])
assert sorted(t.tag for t in Template.get_tags(build.template_id)) == ["production", "stable", "v1"]
Template.remove_tags("python-sync", "stable")
with Sandbox.create("python-sync:production", timeout=120) as box:
    assert box.commands.run("cat here.txt out.txt; echo $WORD").stdout == "copied\nsaid\nsaid\n"

try:
    Template.build(Template().from_template("base").run_cmd("echo no; exit 4"), "python-broken")
    raise AssertionError("a failing step did not raise")
except Exception as err:
    assert type(err).__name__ == "BuildException", err
    print(err)
