// The official CLI, as npm has it: what it does with sandboxes.
import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { dirname, join } from 'node:path'
import { after, before, describe, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import * as e2b from 'e2b'
import { eventually, start } from './server.mjs'

const program = join(dirname(fileURLToPath(import.meta.url)), 'node_modules/.bin/e2b')
let server, box

before(async () => {
  server = await start()
  box = await e2b.Sandbox.create({ timeoutMs: 600_000, metadata: { owner: 'cli' } })
})
after(async () => {
  await box?.kill()
  await server?.stop()
})

/** e2bCLI runs the CLI with a terminal (by script, as a person has one) or without, types input when asked to. */
function e2bCLI(args, { terminal = false, input } = {}) {
  const env = { ...process.env, NO_COLOR: '1', FORCE_COLOR: '0', TERM: 'xterm' }
  const child = terminal
    ? spawn('script', ['-qec', [program, ...args].map((a) => `'${a}'`).join(' '), '/dev/null'], { env })
    : spawn(program, args, { env })
  let out = ''
  let errors = ''
  child.stdout.on('data', (b) => (out += b))
  child.stderr.on('data', (b) => (errors += b))
  const end = new Promise((done) => child.on('close', (code) => done({ code, out, errors })))
  if (input !== undefined) child.stdin.end(input)
  return { child, end, text: () => out, type: (s) => child.stdin.write(s) }
}
const run = (...args) => e2bCLI(args, { input: '' }).end

describe('e2b sandbox', () => {
  test('list, as a table and as JSON, by metadata and state', async () => {
    const table = await run('sandbox', 'list')
    assert.equal(table.code, 0, table.errors)
    assert.match(table.out, new RegExp(box.sandboxId))
    const all = JSON.parse((await run('sandbox', 'list', '-f', 'json', '-m', 'owner=cli', '-s', 'running')).out)
    assert.deepEqual(all.map((s) => s.sandboxId ?? s.sandboxID), [box.sandboxId])
    assert.deepEqual(JSON.parse((await run('sandbox', 'list', '-f', 'json', '-m', 'owner=nobody')).out), [])
  })

  test('info', async () => {
    const r = await run('sandbox', 'info', box.sandboxId, '-f', 'json')
    assert.equal(r.code, 0, r.errors)
    const info = JSON.parse(r.out)
    assert.deepEqual([info.sandboxId ?? info.sandboxID, info.state, info.metadata], [box.sandboxId, 'running', { owner: 'cli' }])
    assert.notEqual((await run('sandbox', 'info', 'inosuchsandbox')).code, 0)
  })

  test('exec passes output, exit code, environment, directory, user and stdin', async () => {
    const r = await run('sandbox', 'exec', '-c', '/tmp', '-e', 'WORD=hello', box.sandboxId, 'echo $WORD; pwd; whoami; echo err >&2; exit 4')
    assert.deepEqual([r.code, r.out, r.errors.split('\n')[0]], [4, 'hello\n/tmp\nuser\n', 'err'])
    assert.equal((await run('sandbox', 'exec', '-u', 'root', box.sandboxId, 'whoami')).out, 'root\n')
    const piped = await e2bCLI(['sandbox', 'exec', box.sandboxId, 'tr a-z A-Z'], { input: 'piped through' }).end
    assert.deepEqual([piped.code, piped.out], [0, 'PIPED THROUGH'])
  })

  test('exec in the background says the process', async () => {
    const r = await run('sandbox', 'exec', '-b', box.sandboxId, 'sleep 60')
    assert.equal(r.code, 0, r.errors)
    const processes = await box.commands.list()
    assert.ok(processes.some((p) => p.args.join(' ').includes('sleep 60')))
  })

  test('connect is a terminal', async () => {
    const cli = e2bCLI(['sandbox', 'connect', box.sandboxId], { terminal: true })
    await eventually('the prompt', () => /\$ /.test(cli.text()))
    cli.type('echo the answer is $((6 * 7)); whoami; tty\n')
    await eventually('the answer', () => /the answer is 42[^]*user[^]*\/dev\/pts/.test(cli.text()))
    cli.type('exit\n')
    const { code } = await cli.end
    assert.equal(code, 0)
    assert.equal(await box.isRunning(), true)
  })

  test('create, detached and with a terminal; kill, one and all', async () => {
    const r = await run('sandbox', 'create', 'base', '--detach', '--timeout', '120')
    assert.equal(r.code, 0, r.errors + r.out)
    const id = r.out.match(/\bi[a-z0-9]{20}\b/)[0]
    const killed = await run('sandbox', 'kill', id)
    assert.equal(killed.code, 0, killed.errors)
    await assert.rejects(e2b.Sandbox.getInfo(id), e2b.SandboxNotFoundError)

    const cli = e2bCLI(['sandbox', 'create', 'base'], { terminal: true })
    await eventually('the prompt', () => /\$ /.test(cli.text()))
    cli.type('hostname; exit\n')
    assert.equal((await cli.end).code, 0)

    const mine = await e2b.Sandbox.create({ metadata: { batch: 'all' } })
    assert.equal((await run('sandbox', 'kill', '--all', '-m', 'batch=all')).code, 0)
    assert.equal(await mine.isRunning(), false)
    assert.equal(await box.isRunning(), true)
  })

  test('pause and resume', async () => {
    const other = await e2b.Sandbox.create({ timeoutMs: 120_000, metadata: { owner: 'pause' } })
    await other.files.write('state', 'kept')
    const paused = await run('sandbox', 'pause', other.sandboxId)
    assert.equal(paused.code, 0, paused.errors)
    const list = JSON.parse((await run('sandbox', 'list', '-f', 'json', '-s', 'paused', '-m', 'owner=pause')).out)
    assert.deepEqual(list.map((s) => s.sandboxId ?? s.sandboxID), [other.sandboxId])
    const resumed = await run('sandbox', 'resume', other.sandboxId)
    assert.equal(resumed.code, 0, resumed.errors)
    assert.equal(await other.files.read('state'), 'kept')
    assert.equal((await run('sandbox', 'pause', other.sandboxId)).code, 0)
    assert.equal((await run('sandbox', 'kill', '--all', '-s', 'paused', '-m', 'owner=pause')).code, 0)
    await assert.rejects(other.getInfo(), e2b.SandboxNotFoundError)
  })

  test('metrics and logs', async () => {
    await eventually('a sample', async () => (await box.getMetrics()).length)
    const metrics = await run('sandbox', 'metrics', box.sandboxId)
    assert.equal(metrics.code, 0, metrics.errors)
    assert.match(metrics.out, /CPU[^]*Memory[^]*MiB/i)
    const json = await run('sandbox', 'metrics', box.sandboxId, '--format', 'json')
    assert.ok(JSON.parse(json.out.trim().split('\n')[0]), json.out)
    const logs = await run('sandbox', 'logs', box.sandboxId, '--level', 'DEBUG')
    assert.equal(logs.code, 0, logs.errors)
    assert.match(logs.out, /process|sandbox/i)
  })

  test('create with a lifecycle', async () => {
    const r = await run('sandbox', 'create', 'base', '--detach', '--timeout', '30', '--lifecycle.ontimeout', 'pause', '--lifecycle.autoresume')
    assert.equal(r.code, 0, r.errors + r.out)
    const id = r.out.match(/\bi[a-z0-9]{20}\b/)[0]
    assert.deepEqual((await e2b.Sandbox.getInfo(id)).lifecycle, { onTimeout: 'pause', autoResume: true })
    await e2b.Sandbox.kill(id)
  })
})
