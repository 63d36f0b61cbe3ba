// The official CLI, as npm has it: what it does with sandboxes and with templates.
// serveImages of test/e2e says which images the registry at REGISTRY has.
import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { dirname, join } from 'node:path'
import { after, before, describe, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import * as e2b from 'e2b'
import { eventually, start } from './server.mjs'

const program = join(dirname(fileURLToPath(import.meta.url)), 'node_modules/.bin/e2b')
const registry = process.env.REGISTRY
let server, box

before(async () => {
  server = await start(...(registry ? ['--registry-allow', `http://${registry}`] : []))
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

describe('e2b template', () => {
  let dir
  before(() => {
    dir = mkdtempSync(join(tmpdir(), 'postern-cli-'))
  })
  after(() => rmSync(dir, { recursive: true, force: true }))
  const listed = async () => JSON.parse((await run('template', 'list', '-f', 'json')).out)

  test('list of nothing', async () => {
    assert.match((await run('template', 'list')).out, /No templates found/)
    assert.deepEqual(await listed(), [])
  })

  test('init and migrate write files', async () => {
    const r = await run('template', 'init', '-n', 'from-init', '-l', 'typescript', '-p', dir)
    assert.equal(r.code, 0, r.errors + r.out)
    assert.match(readFileSync(join(dir, 'from-init/template.ts'), 'utf8'), /Template\(\)/)
    const old = join(dir, 'old')
    mkdirSync(old)
    writeFileSync(join(old, 'e2b.Dockerfile'), 'FROM debian:12\nRUN echo hello\n')
    writeFileSync(join(old, 'e2b.toml'), 'template_id = "abcdefghij0123456789"\ntemplate_name = "old"\ndockerfile = "e2b.Dockerfile"\nstart_cmd = "sleep 1"\n')
    const m = await run('template', 'migrate', '-p', old, '-l', 'python-sync')
    assert.equal(m.code, 0, m.errors + m.out)
    assert.match(readFileSync(join(old, 'template.py'), 'utf8'), /from_image\("debian:12"\)/)
  })

  test('create builds a Dockerfile, and says what failed', { skip: !registry && 'no REGISTRY' }, async () => {
    writeFileSync(join(dir, 'hello.txt'), 'hello from a file\n')
    writeFileSync(join(dir, 'e2b.Dockerfile'), `FROM ${registry}/tiny:latest\nCOPY hello.txt /srv/\nRUN cat /srv/hello.txt >/srv/copy\n`)
    const r = await run('template', 'create', 'cli-made', '-p', dir, '-c', 'sleep 1000', '--ready-cmd', 'true', '--cpu-count', '1', '--memory-mb', '512')
    assert.equal(r.code, 0, r.errors + r.out)
    assert.match(r.out, /Building sandbox template cli-made finished/)
    const [t] = await listed()
    assert.deepEqual([t.aliases, t.cpuCount, t.memoryMB, t.public, t.buildStatus], [['cli-made'], 1, 512, false, 'ready'])
    assert.match((await run('template', 'list')).out, new RegExp(`Private[^]*${t.templateID}[^]*cli-made`))

    writeFileSync(join(dir, 'Broken'), `FROM ${registry}/tiny:latest\nRUN echo on the way; exit 9\n`)
    const bad = await run('template', 'create', 'cli-broken', '-p', dir, '-d', 'Broken')
    assert.equal(bad.code, 1)
    assert.match(bad.out + bad.errors, /on the way[^]*9/)
    assert.equal((await run('template', 'create', 'cli-odd', '-p', dir, '--cpu-count', '3')).code, 1)
  })

  test('sandboxes of it, publish, unpublish and delete', { skip: !registry && 'no REGISTRY' }, async () => {
    const made = await run('sandbox', 'create', 'cli-made', '--detach', '--timeout', '120')
    assert.equal(made.code, 0, made.errors + made.out)
    const id = made.out.match(/\bi[a-z0-9]{20}\b/)[0]
    assert.equal((await run('sandbox', 'exec', id, 'cat /srv/copy')).out, 'hello from a file\n')
    const [t] = (await listed()).filter((t) => t.aliases[0] === 'cli-made')
    const published = await run('template', 'publish', t.templateID, '-y')
    assert.equal(published.code, 0, published.errors + published.out)
    assert.match(published.out, /Published as: .*\/cli-made/)
    assert.equal((await listed()).find((l) => l.templateID === t.templateID).public, true)
    assert.equal((await run('template', 'unpublish', 'cli-made', '-y')).code, 0)
    assert.equal((await listed()).find((l) => l.templateID === t.templateID).public, false)
    const inUse = await run('template', 'delete', 'cli-made', '-y')
    assert.equal(inUse.code, 1)
    assert.match(inUse.errors + inUse.out, /kill them first/)
    assert.equal((await run('sandbox', 'kill', id)).code, 0)
    assert.equal((await run('template', 'delete', 'cli-made', '-y')).code, 0)
    assert.ok(!(await listed()).some((t) => t.aliases[0] === 'cli-made'))
    assert.notEqual((await run('template', 'delete', 'cli-made', '-y')).code, 0)
  })

  test('build is of the first build system, and says what to use', async () => {
    const r = await run('template', 'build')
    assert.equal(r.code, 1)
    assert.match(r.out, /deprecated/i)
    assert.ok(!existsSync(join(dir, 'e2b.toml')))
  })
})
