// Pause, resume, auto-pause, auto-resume, fork and snapshots, by the official
// SDK.
import assert from 'node:assert/strict'
import { createHash, randomBytes } from 'node:crypto'
import { after, before, describe, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import * as e2b from 'e2b'
import { eventually, start } from './server.mjs'

const { Sandbox } = e2b
const sha256 = (b) => createHash('sha256').update(b).digest('hex')
let server
const made = []
const create = async (...args) => {
  const box = await Sandbox.create(...args)
  made.push(box)
  return box
}
/** port asks a port of a sandbox, as its public URL would be asked. */
const port = (box, n, headers = {}) => fetch(server.url + '/', { headers: { 'e2b-sandbox-id': box.sandboxId, 'e2b-sandbox-port': String(n), ...headers } })
const bootID = async (box) => (await box.commands.run('cat /proc/sys/kernel/random/boot_id')).stdout.trim()

before(async () => {
  server = await start('--public-ports', '--snapshots')
})
after(async () => {
  await Promise.all(made.map((b) => b.kill().catch(() => {})))
  await server?.stop()
})

describe('pause and resume', () => {
  test('many times, with changes each time, keep every file and the memory', async () => {
    // "make soak-tests" runs a longer sequence.
    const rounds = 7 * Number(process.env.POSTERN_TEST_CYCLES || 1)
    const box = await create({ timeoutMs: 900_000, envs: { WHO: 'me' } })
    // State that is only in memory: a process that counts and answers by a pipe.
    await box.files.write('count.py', 'import sys\nn = 0\nfor line in sys.stdin:\n    n += 1\n    print(n, flush=True)\n')
    const counted = []
    const counter = await box.commands.run('exec python3 count.py', { background: true, stdin: true, timeoutMs: 0, onStdout: (s) => void counted.push(...s.trim().split('\n')) })
    const want = new Map()
    const compare = async (round) => {
      const lines = (await box.commands.run('cd keep && find . -type f -print0 | xargs -0r sha256sum', { timeoutMs: 120_000 })).stdout.trim().split('\n')
      const got = new Map(lines.filter(Boolean).map((l) => [l.slice(66 + 2), l.slice(0, 64)]))
      assert.deepEqual([...got].sort(), [...want].sort(), `round ${round}`)
    }
    await box.files.makeDir('keep')
    for (let round = 1; round <= rounds; round++) {
      // New files by the API and from inside, one rewritten, one appended to,
      // one removed, a big one touched in the middle.
      const files = Array.from({ length: 5 }, (_, i) => ({ name: `${round}/${i}`, data: randomBytes(1000 * (i + 1)) }))
      await box.files.write(files.map((f) => ({ path: `keep/${f.name}`, data: f.data.buffer.slice(f.data.byteOffset, f.data.byteOffset + f.data.length) })))
      for (const f of files) want.set(f.name, sha256(f.data))
      await box.files.write('keep/rewritten', `round ${round}`)
      want.set('rewritten', sha256(`round ${round}`))
      await box.commands.run(`echo ${round} >>keep/appended; head -c 3000000 /dev/urandom | dd of=keep/big bs=1000 seek=${round} conv=notrunc status=none`)
      want.set('appended', sha256(Array.from({ length: round }, (_, i) => `${i + 1}\n`).join('')))
      want.set('big', (await box.commands.run('sha256sum <keep/big')).stdout.slice(0, 64))
      if (round > 2) {
        await box.files.remove(`keep/${round - 2}/0`)
        want.delete(`${round - 2}/0`)
      }
      assert.equal(await box.pause(), true)
      assert.equal(await box.isRunning(), false)
      await box.connect({ timeoutMs: 900_000 })
      await compare(round)
      await box.commands.sendStdin(counter.pid, 'x\n')
    }
    const again = []
    const handle = await box.commands.connect(counter.pid, { timeoutMs: 0, onStdout: (s) => void again.push(...s.trim().split('\n')) })
    await eventually('the counter', async () => {
      await box.commands.sendStdin(counter.pid, 'x\n')
      return again.length > 0
    })
    // The line that the last round sent may be answered only now, so this is not yet rounds + 1.
    assert.ok(Number(again[0]) >= rounds, `the counter says ${again[0]}: its memory was lost`)
    await handle.kill()
    assert.equal((await box.commands.run('echo $WHO')).stdout, 'me\n')
  })

  test('twice is false, of an unknown one SandboxNotFoundError; a paused one is listed, shown and killed', async () => {
    const box = await create({ metadata: { test: 'paused' } })
    assert.equal(await box.pause(), true)
    assert.equal(await box.pause(), false)
    assert.equal((await box.getInfo()).state, 'paused')
    const query = { metadata: { test: 'paused' } }
    assert.deepEqual((await Sandbox.list({ query: { ...query, state: ['paused'] } }).nextItems()).map((s) => s.sandboxId), [box.sandboxId])
    assert.deepEqual(await Sandbox.list({ query: { ...query, state: ['running'] } }).nextItems(), [])
    assert.deepEqual((await Sandbox.list({ query }).nextItems()).map((s) => s.state), ['paused'])
    await assert.rejects(box.commands.run('true'), (e) => e instanceof e2b.SandboxNotFoundError || e instanceof e2b.TimeoutError)
    assert.equal(await Sandbox.kill(box.sandboxId), true)
    await assert.rejects(Sandbox.connect(box.sandboxId), e2b.SandboxNotFoundError)
    await assert.rejects(Sandbox.pause(box.sandboxId), e2b.SandboxNotFoundError)
  })

  test('keeps processes, their ids and what listens; the clock goes on, the machine is the same', async () => {
    const box = await create({ timeoutMs: 300_000 })
    await box.commands.run('python3 -m http.server 8000', { background: true, timeoutMs: 0 })
    await eventually('the server inside', async () => (await port(box, 8000)).status === 200)
    const before = await bootID(box)
    await box.pause()
    await sleep(1500)
    const again = await Sandbox.connect(box.sandboxId, { timeoutMs: 300_000 })
    assert.equal((await port(box, 8000)).status, 200)
    assert.equal(await bootID(again), before)
    const asked = Date.now() / 1000
    const inside = Number((await again.commands.run('date +%s.%N')).stdout)
    assert.ok(inside > asked - 2 && inside < Date.now() / 1000 + 2, `the clock inside is ${inside - asked} s off`)
    // The handle from before works too: the credentials are the same.
    assert.equal((await box.commands.run('echo old handle')).stdout, 'old handle\n')
  })

  test('with files alone boots anew and keeps every file', async () => {
    const box = await create({ timeoutMs: 300_000 })
    const bytes = randomBytes(5_000_000)
    await box.files.write('/home/user/kept', new Blob([bytes]))
    const handle = await box.commands.run('sleep 1000', { background: true, timeoutMs: 0 })
    handle.wait().catch(() => {})
    const before = await bootID(box)
    assert.equal(await box.pause({ keepMemory: false }), true)
    await box.connect()
    assert.equal((await box.commands.run('sha256sum </home/user/kept')).stdout.slice(0, 64), sha256(bytes))
    assert.notEqual(await bootID(box), before)
    assert.equal((await box.commands.list()).some((p) => p.args.join(' ').includes('sleep 1000')), false)
  })

  test('by hand: 204, 409 when paused already, connect answers 201 when it resumed and 200 when it ran', async () => {
    for (const path of ['/v2/sandboxes', '/sandboxes']) {
      const box = await create()
      const id = box.sandboxId
      await box.commands.run('head -c 100M /dev/urandom >/dev/shm/x') // to be saved while the other pauses arrive
      assert.equal((await server.api('POST', `/sandboxes/${id}/resume`, {})).status, 409)
      const pauses = await Promise.all([1, 2, 3].map(() => server.api('POST', `/sandboxes/${id}/pause`)))
      assert.deepEqual(pauses.map((p) => p.status), [204, 204, 204])
      const twice = await server.api('POST', `/sandboxes/${id}/pause`, {})
      assert.deepEqual([twice.status, twice.json.code], [409, 409])
      const resumed = await server.api('POST', `${path}/${id}/connect`, { timeout: 77 })
      assert.deepEqual([resumed.status, resumed.json.sandboxID], [201, id])
      assert.equal((await server.api('POST', `${path}/${id}/connect`, { timeout: 10 })).status, 200)
      const info = (await server.api('GET', `/sandboxes/${id}`)).json
      assert.ok(Math.abs(Date.parse(info.endAt) - Date.now() - 77_000) < 30_000)
      await Sandbox.kill(id)
    }
  })
})

describe('at the timeout', () => {
  test('a sandbox with auto-pause pauses, and connect resumes it, repeatedly', async () => {
    const box = await create({ timeoutMs: 300_000, lifecycle: { onTimeout: 'pause' } })
    assert.deepEqual((await box.getInfo()).lifecycle, { onTimeout: 'pause', autoResume: false })
    await box.files.write('state', '1')
    for (let i = 0; i < 2; i++) {
      await box.setTimeout(1000)
      await eventually('the pause', async () => (await box.getInfo()).state === 'paused')
      assert.notEqual((await port(box, 8000)).status, 200)
      assert.equal((await box.getInfo()).state, 'paused', 'traffic has woken it')
      await box.connect({ timeoutMs: 300_000 })
      assert.equal(await box.files.read('state'), '1')
    }
  })

  test('with auto-resume, traffic wakes it: to a port, and of the SDK', async () => {
    const box = await create({ timeoutMs: 300_000, lifecycle: { onTimeout: 'pause', autoResume: true } })
    await box.commands.run('echo served >index.html; python3 -m http.server 8000', { background: true, timeoutMs: 0 })
    await eventually('the server inside', async () => (await port(box, 8000)).status === 200)
    await box.setTimeout(1000)
    await eventually('the pause', async () => (await box.getInfo()).state === 'paused')
    const all = await Promise.all(Array.from({ length: 8 }, () => port(box, 8000).then((r) => r.text())))
    assert.deepEqual(all, Array(8).fill('served\n'))
    const info = await box.getInfo()
    assert.equal(info.state, 'running')
    assert.ok(info.endAt - Date.now() > 60_000, 'it was not given time')
    await box.pause()
    assert.equal(await box.files.read('index.html'), 'served\n')
  })

  test('with files alone it boots anew, by connect and never by traffic', async () => {
    const box = await create({ timeoutMs: 300_000, lifecycle: { onTimeout: { action: 'pause', keepMemory: false } } })
    await box.files.write('state', 'kept')
    const before = await bootID(box)
    await box.setTimeout(1000)
    await eventually('the pause', async () => (await box.getInfo()).state === 'paused')
    await box.connect({ timeoutMs: 300_000 })
    assert.equal(await box.files.read('state'), 'kept')
    assert.notEqual(await bootID(box), before)
  })

  test('contradictory options are refused', async () => {
    for (const body of [{ autoPauseMemory: false }, { autoPause: true, autoPauseMemory: false, autoResume: { enabled: true } }]) {
      const r = await server.api('POST', '/v2/sandboxes', { templateID: 'base', ...body })
      assert.deepEqual([r.status, r.json?.code], [400, 400], `${JSON.stringify(body)}: ${r.text}`)
    }
  })
})

describe('fork', () => {
  test('gives isolated sandboxes with the state of that moment', async () => {
    const box = await create({ timeoutMs: 300_000, envs: { WHO: 'me' } })
    await box.files.write('state', 'before')
    await box.commands.run('sleep 1000', { background: true, timeoutMs: 0 })
    const forks = await box.fork({ count: 3, timeoutMs: 120_000 })
    forks.forEach((f) => made.push(f))
    assert.equal(forks.length, 3)
    assert.equal(new Set([box, ...forks].map((b) => b.sandboxId)).size, 4)
    for (const [i, f] of forks.entries()) {
      assert.ok(f instanceof Sandbox, `${f}`)
      assert.equal(await f.files.read('state'), 'before')
      await f.files.write('state', `fork ${i}`)
      assert.ok((await f.commands.list()).some((p) => p.args.join(' ').includes('sleep 1000')))
    }
    await box.files.write('state', 'the first')
    const states = await Promise.all([box, ...forks].map((b) => b.files.read('state')))
    assert.deepEqual(states, ['the first', 'fork 0', 'fork 1', 'fork 2'])
    // Nothing random or secret is the same in two of them.
    const show = "cat /proc/sys/kernel/random/uuid; hostname; head -c 16 /dev/urandom | sha256sum; python3 -c 'import secrets; print(secrets.token_hex())'"
    const seen = (await Promise.all([box, ...forks].map((b) => b.commands.run(show)))).flatMap((r) => r.stdout.trim().split('\n'))
    assert.equal(new Set(seen).size, seen.length, seen.join('\n'))
  })

  test('of a killed or paused sandbox, or with a wrong count, is refused', async () => {
    const box = await create()
    for (const count of [0, 101]) assert.equal((await server.api('POST', `/sandboxes/${box.sandboxId}/fork`, { count })).status, 400)
    await box.pause()
    assert.equal((await server.api('POST', `/sandboxes/${box.sandboxId}/fork`, {})).status, 409)
    await box.kill()
    await assert.rejects(box.fork(), e2b.SandboxNotFoundError)
  })
})

describe('snapshots', () => {
  test('are made of a running sandbox, which goes on; sandboxes start from them; they are deleted', async () => {
    const box = await create({ timeoutMs: 300_000 })
    await box.files.write('state', 'at the snapshot')
    const handle = await box.commands.run('sleep 1000', { background: true, timeoutMs: 0 })
    const snapshot = await box.createSnapshot()
    assert.equal(await box.isRunning(), true)
    assert.ok((await box.commands.list()).some((p) => p.pid === handle.pid))
    await box.files.write('state', 'after it')
    const first = await create(snapshot.snapshotId)
    const second = await create(snapshot.snapshotId)
    assert.equal((await Sandbox.getInfo(first.sandboxId)).templateId, snapshot.snapshotId)
    assert.equal(await first.files.read('state'), 'at the snapshot')
    await first.files.write('state', 'the first')
    assert.equal(await second.files.read('state'), 'at the snapshot')
    assert.equal(await box.files.read('state'), 'after it')
    assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
    assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), false)
    await assert.rejects(Sandbox.create(snapshot.snapshotId))
    assert.equal(await second.files.read('state'), 'at the snapshot', 'it lives on without its snapshot')
  })

  test('have names, are listed by sandbox and name, page by page, and outlive their sandbox', async () => {
    const box = await create()
    const named = await box.createSnapshot({ name: 'named-one' })
    assert.ok(named.names?.some((n) => n.includes('named-one')) || /named-one/.test(named.snapshotId), JSON.stringify(named))
    const more = [await box.createSnapshot(), await box.createSnapshot()]
    const ids = [named, ...more].map((s) => s.snapshotId)
    await box.kill()
    const pages = Sandbox.listSnapshots({ sandboxId: box.sandboxId, limit: 2 })
    const got = [...(await pages.nextItems()), ...(pages.hasNext ? await pages.nextItems() : [])].map((s) => s.snapshotId)
    assert.deepEqual([...got].sort(), [...ids].sort())
    assert.deepEqual(await Sandbox.listSnapshots({ sandboxId: 'inosuch' }).nextItems(), [])
    const back = await create('named-one')
    assert.equal((await back.commands.run('echo back')).stdout, 'back\n')
    for (const id of ids) assert.equal(await Sandbox.deleteSnapshot(id), true)
    await assert.rejects(box.createSnapshot(), e2b.SandboxNotFoundError)
  })
})
