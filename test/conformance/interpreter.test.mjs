// The code interpreter, by the official SDK.
import assert from 'node:assert/strict'
import { after, before, describe, test } from 'node:test'
import * as ci from '@e2b/code-interpreter'
import { collector, eventually, start } from './server.mjs'

let server, box
before(async () => {
  server = await start()
  box = await ci.Sandbox.create({ timeoutMs: 600_000, envs: { COLOUR: 'green' } })
})
after(async () => {
  await box?.kill()
  await server?.stop()
})

describe('python', () => {
  test('keeps its state from one execution to the next, and counts them', async () => {
    const first = await box.runCode('x = 20')
    assert.deepEqual([first.results.length, first.text, first.error], [0, undefined, undefined])
    const second = await box.runCode('x += 1; x * 2')
    assert.equal(second.text, '42')
    assert.equal(second.executionCount, first.executionCount + 1)
  })

  test('streams what it prints, results and errors to callbacks', async () => {
    const out = collector()
    const err = collector()
    const results = []
    let failure
    const run = await box.runCode('import sys\nprint("out")\nprint("err", file=sys.stderr)\ndisplay("shown")\n1/0', {
      onStdout: (m) => out.add(m.line),
      onStderr: (m) => err.add(m.line),
      onResult: (r) => void results.push(r.text),
      onError: (e) => (failure = e),
    })
    assert.deepEqual([out.text(), err.text(), results], ['out\n', 'err\n', ['shown']])
    assert.deepEqual([run.logs.stdout, run.logs.stderr], [['out\n'], ['err\n']])
    assert.equal(failure.name, 'ZeroDivisionError')
    assert.deepEqual([run.error.name, run.error.value], ['ZeroDivisionError', 'division by zero'])
    assert.match(run.error.traceback, /ZeroDivisionError/)
  })

  test('returns output in the order in which it was printed', async () => {
    for (const [code, want] of [
      ['print("a", "b")', ['a b\n']],
      ['print("two\\nlines")', ['two\nlines\n']],
      ['import time\nprint(1); time.sleep(1); print(2)', ['1\n', '2\n']],
    ]) assert.deepEqual((await box.runCode(code)).logs.stdout, want, code)
    const order = []
    await box.runCode('import sys, os\nfor i in range(3):\n  print(i); print(i, file=sys.stderr)\nos.system("echo child");', {
      onStdout: (m) => void order.push(`out ${m.line}`), onStderr: (m) => void order.push(`err ${m.line}`),
    })
    assert.deepEqual(order, ['out 0\n', 'err 0\n', 'out 1\n', 'err 1\n', 'out 2\n', 'err 2\n', 'out child\n'])
  })

  test('shows results in every format', async () => {
    const code = `
class Rich:
    def _repr_html_(self): return "<b>html</b>"
    def _repr_markdown_(self): return "*markdown*"
    def _repr_svg_(self): return "<svg></svg>"
    def _repr_latex_(self): return "$x$"
    def _repr_json_(self): return {"a": 1}
    def _repr_javascript_(self): return "1+1"
    def __repr__(self): return "plain"
Rich()`
    const [r] = (await box.runCode(code)).results
    assert.deepEqual([r.text, r.html, r.markdown, r.svg, r.latex, r.json, r.javascript], ['plain', '<b>html</b>', '*markdown*', '<svg></svg>', '$x$', { a: 1 }, '1+1'])
    assert.equal(r.isMainResult, true)
    assert.ok(r.formats().includes('html'))
    const many = (await box.runCode('display(1); display(2); 3')).results
    assert.deepEqual(many.map((m) => [m.text, m.isMainResult]), [['1', false], ['2', false], ['3', true]])
  })

  test('draws pictures and returns tables as data', async () => {
    const picture = (await box.runCode('import matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\nplt.show()')).results[0]
    assert.equal(Buffer.from(picture.png, 'base64').subarray(1, 4).toString(), 'PNG')
    const saved = (await box.runCode('from PIL import Image\nImage.new("RGB", (4, 4)).save("saved.png")')).results[0]
    assert.equal(Buffer.from(saved.png, 'base64').subarray(1, 4).toString(), 'PNG')
    assert.equal(Buffer.from(await box.files.read('/home/user/saved.png', { format: 'bytes' })).subarray(1, 4).toString(), 'PNG')
    const table = (await box.runCode('import pandas as pd\npd.DataFrame({"a": [1, 2], "b": ["x", "y"]})')).results[0]
    assert.match(table.html, /<table/)
    assert.deepEqual(table.data, { a: [1, 2], b: ['x', 'y'] })
  })

  test('has the environment of the sandbox, and that of a call only during the call', async () => {
    const show = 'import os; os.environ.get("COLOUR"), os.environ.get("MOOD")'
    assert.equal((await box.runCode(show, { envs: { MOOD: 'calm', COLOUR: 'red' } })).text, "('red', 'calm')")
    assert.equal((await box.runCode(show)).text, "('green', None)")
  })

  test('gives a cell the same environment as a command', async () => {
    // These are the shell's, which sets a PATH of its own as well.
    const names = (text) => text.trim().split('\n').filter((l) => !/^(SHLVL|PWD|OLDPWD|_)=/.test(l)).map((l) => l.replace(/^PATH=.*/, 'PATH')).sort()
    const command = names((await box.commands.run('env')).stdout)
    const list = 'print(*(f"{k}={v}" for k, v in os.environ.items()), sep="\\n")'
    assert.deepEqual(names((await box.runCode(`import os\n${list}`)).logs.stdout.join('')), command)
    assert.deepEqual(names((await box.runCode('import os\nos.system("env");')).logs.stdout.join('')), command)
  })

  test('runs shell commands, awaits at the top level, reads what files.write wrote', async () => {
    await box.files.write('/home/user/numbers.csv', '1,2\n')
    assert.equal((await box.runCode('open("numbers.csv").read()')).text, '1,2\\n')
    assert.deepEqual((await box.runCode('!echo from the shell')).logs.stdout.join('').trim(), 'from the shell')
    assert.equal((await box.runCode('import asyncio\nawait asyncio.sleep(0.01)\n"awaited"')).text, 'awaited')
  })

  test('is interrupted by its timeout and keeps its state', async () => {
    await box.runCode('kept = 1')
    await assert.rejects(box.runCode('import time\nwhile True: time.sleep(0.1)', { timeoutMs: 1500 }), (e) => e.name === 'TimeoutError' || /timed out|timeout/i.test(e.message))
    await eventually('the answer after it', async () => (await box.runCode('kept + 1', { timeoutMs: 30_000 }).catch(() => ({}))).text === '2')
  })

  test('restarts after its process has died', async () => {
    const died = await box.runCode('import os; os._exit(1)').catch((e) => e)
    assert.ok(died instanceof Error || died.error, 'nothing said that it died')
    await eventually('a new one', async () => (await box.runCode('1 + 1', { timeoutMs: 30_000 }).catch(() => ({}))).text === '2', 180)
  })
})

describe('contexts', () => {
  test('have their own variables and directories', async () => {
    const a = await box.createCodeContext({ cwd: '/tmp' })
    const b = await box.createCodeContext()
    assert.deepEqual([a.language, a.cwd, b.cwd], ['python', '/tmp', '/home/user'])
    await box.runCode('where = "a"', { context: a })
    assert.equal((await box.runCode('where', { context: b })).error.name, 'NameError')
    assert.equal((await box.runCode('import os; where, os.getcwd()', { context: a })).text, "('a', '/tmp')")
    const ids = (await box.listCodeContexts()).map((c) => c.id)
    assert.ok(ids.includes(a.id) && ids.includes(b.id))
    await box.restartCodeContext(a)
    assert.equal((await box.runCode('where', { context: a })).error.name, 'NameError')
    await box.removeCodeContext(a)
    await box.removeCodeContext(b.id)
    const left = (await box.listCodeContexts()).map((c) => c.id)
    assert.ok(!left.includes(a.id) && !left.includes(b.id))
  })

  test('that do not exist, and unknown languages, are refused with an error text', async () => {
    await assert.rejects(box.runCode('1', { context: { id: 'no-such', language: 'python', cwd: '/' } }), /not found|no-such/i)
    await assert.rejects(box.createCodeContext({ language: 'cobol' }), /400/)
    await assert.rejects(box.createCodeContext({ cwd: '/root' }), /400/)
    const { error } = await box.runCode('1', { language: 'cobol' }) // a status would come without its text
    assert.deepEqual([error.name, /cobol.*python/.test(error.value)], ['UnsupportedLanguage', true])
  })
})

describe('languages', () => {
  const cases = {
    javascript: ["import { sep } from 'node:path'\nlet n = 41; console.log(typeof require)", 'n + 1', 'process.env.COLOUR + process.env.ONCE', "throw new TypeError('as we wished')", 'TypeError'],
    typescript: ['interface N { n: number }\nconst o: N = { n: 41 }; console.log("function")', 'await Promise.resolve(o.n + 1)', 'process.env.COLOUR! + process.env.ONCE', "throw new TypeError('as we wished')", 'TypeError'],
    r: ['n <- 41; cat("function")', 'n + 1', 'paste0(Sys.getenv("COLOUR"), Sys.getenv("ONCE"))', "stop('as we wished')", 'ERROR'],
    java: ['int n = 41; System.out.println("function");', 'n + 1', 'System.getProperty("COLOUR") + System.getenv("ONCE")', 'throw new IllegalStateException("as we wished")', 'IllegalStateException'],
    bash: ['n=41; echo function', 'echo $((n + 1))', 'echo $COLOUR$ONCE', 'echo as we wished; false', 'ExitStatus'],
  }
  const shown = (e) => e.logs.stdout.join('') + e.results.map((r) => r.text).join('')
  for (const [language, [set, get, env, fail, name]] of Object.entries(cases)) {
    test(`${language} keeps its state, has the environment, tells its errors and is interrupted`, async () => {
      const out = collector()
      const first = await box.runCode(set, { language, onStdout: (m) => out.add(m.line) })
      assert.deepEqual([first.error, out.text().trim()], [undefined, 'function'])
      const second = await box.runCode(get, { language })
      assert.match(shown(second), /42/)
      assert.equal(second.executionCount, first.executionCount + 1)
      assert.match(shown(await box.runCode(env, { language, envs: { ONCE: 'now' } })), /greennow/)
      assert.doesNotMatch(shown(await box.runCode(env, { language })), /now/)
      const failed = await box.runCode(fail, { language })
      assert.equal(failed.error.name, name)
      assert.match(failed.error.value + shown(failed), /as we wished/)
      const loop = { r: 'while (TRUE) {}', bash: 'while :; do :; done' }[language] ?? 'while (true) {}'
      await assert.rejects(box.runCode(loop, { language, timeoutMs: 1500 }))
      assert.match(shown(await box.runCode(get, { language, timeoutMs: 60_000 })), /42/)
      const own = await box.createCodeContext({ language, cwd: '/tmp' })
      assert.deepEqual([own.language, own.cwd], [language, '/tmp'])
      assert.doesNotMatch(shown(await box.runCode(get, { context: own })), /42/)
      await box.removeCodeContext(own)
    })
  }

  test('javascript has a context from the start', async () => {
    const other = await ci.Sandbox.create()
    try {
      assert.deepEqual((await other.listCodeContexts()).map((c) => [c.language, c.cwd]), [['python', '/home/user'], ['javascript', '/home/user']])
      const node = await other.commands.run('pgrep -c -x node || true')
      assert.equal(node.stdout.trim(), '0', 'its process runs before it is used')
      assert.equal((await other.runCode('1 + 1', { language: 'js' })).text, '2')
    } finally {
      await other.kill()
    }
  })

  test('keep their state over a pause', async () => {
    const languages = Object.keys(cases)
    for (const language of languages) await box.runCode(cases[language][0], { language })
    await box.pause()
    await box.connect()
    for (const language of languages) assert.match(shown(await box.runCode(cases[language][1], { language, timeoutMs: 60_000 })), /42/, language)
  })
})

test('figures come with their charts, tables and lists as data', async () => {
  const run = await box.runCode(`
import matplotlib.pyplot as plt, pandas as pd
plt.figure(); plt.bar(['a', 'b'], [1, 2], label='n'); plt.ylabel('Mass (kg)'); plt.show()
plt.figure(); plt.plot([1, 2], [3, 4]); plt.show()
display(pd.DataFrame({'x': [1, None]}))
[1, {'a': None}]`)
  const [bar, line, table, list] = run.results
  assert.deepEqual(bar.chart, {
    type: 'bar', title: null, x_label: null, y_label: 'Mass (kg)', x_unit: null, y_unit: 'kg',
    elements: [{ label: 'a', group: 'n', value: 1 }, { label: 'b', group: 'n', value: 2 }],
  })
  assert.deepEqual([line.chart.type, line.chart.elements, line.chart.x_scale], ['line', [{ label: 'Line 0', points: [[1, 3], [2, 4]] }], 'linear'])
  assert.ok(bar.png && line.png && table.html && table.text)
  assert.deepEqual([table.data, list.json], [{ x: [1, null] }, [1, { a: null }]])
})

test('a killed sandbox does not answer', async () => {
  const other = await ci.Sandbox.create()
  await other.kill()
  await assert.rejects(other.runCode('1', { requestTimeoutMs: 5000 }), (e) => ['TimeoutError', 'SandboxNotFoundError', 'SandboxError'].includes(e.name))
})
