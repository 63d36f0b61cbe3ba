// Drives a guest with the unmodified SDK. Each check prints one line; the first
// that fails ends the run with status 1.
import assert from 'node:assert/strict'
import { Sandbox, CommandExitError, NotFoundError, AuthenticationError, InvalidArgumentError } from 'e2b'

const home = process.env.GUEST_HOME
const sbx = await Sandbox.create()
async function check(name, f) {
  await f()
  console.log(`ok ${name}`)
}

await check('health', async () => assert.equal(await sbx.isRunning(), true))
await check('run', async () => {
  const r = await sbx.commands.run('echo out; echo err >&2; echo "$E2B_SANDBOX $X"', { envs: { X: 'x' } })
  assert.deepEqual([r.exitCode, r.stdout, r.stderr], [0, 'out\ntrue x\n', 'err\n'])
})
await check('exit code', async () => {
  const e = await sbx.commands.run('exit 9').catch((e) => e)
  assert(e instanceof CommandExitError)
  assert.equal(e.exitCode, 9)
})
await check('streams in order', async () => {
  let got = ''
  await sbx.commands.run('for i in 1 2 3; do echo $i; sleep 0.1; done', { onStdout: (s) => { got += s } })
  assert.equal(got, '1\n2\n3\n')
})
await check('8 MB of output', async () => {
  const r = await sbx.commands.run('head -c 8000000 /dev/zero | tr "\\0" x')
  assert.equal(r.stdout.length, 8000000)
})
await check('cwd and its errors', async () => {
  assert.equal((await sbx.commands.run('pwd', { cwd: '/usr' })).stdout, '/usr\n')
  await assert.rejects(sbx.commands.run('pwd', { cwd: '/nope' }), (e) => e instanceof InvalidArgumentError && /cwd '\/nope' does not exist/.test(e.message))
})
await check('users', async () => {
  assert.equal((await sbx.commands.run('id -un')).stdout, 'nobody\n')
  assert.equal((await sbx.commands.run('id -un', { user: 'root' })).stdout, 'root\n')
  await assert.rejects(sbx.commands.run('true', { user: 'no-such-user' }), AuthenticationError)
})
await check('background, stdin, list, connect, kill', async () => {
  const h = await sbx.commands.run('cat', { background: true, stdin: true })
  const list = await sbx.commands.list()
  assert(list.some((p) => p.pid === h.pid && p.cmd === '/bin/bash' && p.args[2] === 'cat'))
  let got = ''
  const c = await sbx.commands.connect(h.pid, { onStdout: (s) => { got += s } })
  await sbx.commands.sendStdin(h.pid, 'hello\n')
  await h.closeStdin()
  assert.equal((await h.wait()).stdout, 'hello\n')
  await c.wait()
  assert.equal(got, 'hello\n')
  const s = await sbx.commands.run('sleep 60', { background: true })
  assert.equal(await s.kill(), true)
  const e = await s.wait().catch((e) => e)
  assert.equal(e.exitCode, -1)
  assert.equal(e.error, 'signal: killed')
  assert.equal(await sbx.commands.kill(s.pid), false)
})
await check('late connect, and environment of a running one', async () => {
  const h = await sbx.commands.run('sleep 0.3; exit 4', { background: true, envs: { K: 'v' } })
  assert.deepEqual((await sbx.commands.list()).find((p) => p.pid === h.pid).envs, { K: 'v' })
  await h.disconnect()
  await new Promise((r) => setTimeout(r, 600))
  const e = await (await sbx.commands.connect(h.pid)).wait().catch((e) => e)
  assert(e instanceof CommandExitError)
  assert.equal(e.exitCode, 4)
  await assert.rejects(sbx.commands.connect(999999), NotFoundError)
})
await check('timeout', async () => {
  await assert.rejects(sbx.commands.run('sleep 60', { timeoutMs: 500 }), { name: 'TimeoutError' })
})
await check('pty', async () => {
  let got = ''
  const dec = new TextDecoder()
  const p = await sbx.pty.create({ cols: 90, rows: 30, onData: (d) => { got += dec.decode(d) } })
  await sbx.pty.resize(p.pid, { cols: 55, rows: 22 })
  await sbx.pty.sendInput(p.pid, new TextEncoder().encode('stty size; exit 0\n'))
  await p.wait()
  assert.match(got, /22 55/)
})
await check('files', async () => {
  const w = await sbx.files.write('dir/a.txt', 'hällo')
  assert.deepEqual([w.name, w.path, w.type], ['a.txt', `${home}/dir/a.txt`, 'file'])
  assert.equal(await sbx.files.read('dir/a.txt'), 'hällo')
  await sbx.files.write('empty', '')
  assert.equal(await sbx.files.read('empty'), '')
  assert.equal((await sbx.files.read('empty', { format: 'bytes' })).length, 0)
  const many = await sbx.files.write([{ path: 'm/1', data: 'one' }, { path: 'm/2', data: 'two' }])
  assert.equal(many.length, 2)
  assert.equal(await sbx.files.read('m/2'), 'two')
  await sbx.files.write('z', 'zipped', { gzip: true })
  assert.equal(await sbx.files.read('z', { gzip: true }), 'zipped')
  const big = new Uint8Array(16 << 20).fill(7)
  await sbx.files.write('big', new Blob([big]).stream())
  const back = await sbx.files.read('big', { format: 'bytes' })
  assert(back.length === big.length && back.every((b) => b === 7))
  await assert.rejects(sbx.files.read('nope'), NotFoundError)
  await assert.rejects(sbx.files.read('dir'), InvalidArgumentError)
  await assert.rejects(sbx.files.read('/etc/shadow'), /permission denied/)
  assert.match(await sbx.files.read('/etc/shadow', { user: 'root' }), /root/)
})
await check('metadata', async () => {
  const meta = { Author: 'me', 'a.b_c': 'x y' }
  const stored = { author: 'me', 'a.b_c': 'x y' }
  assert.deepEqual((await sbx.files.write('meta/1', 'x', { metadata: meta })).metadata, stored)
  assert.deepEqual((await sbx.files.getInfo('meta/1')).metadata, stored)
  assert.deepEqual((await sbx.files.rename('meta/1', 'meta/2')).metadata, stored)
  assert.deepEqual((await sbx.files.list('meta'))[0].metadata, stored)
  const many = await sbx.files.write([{ path: 'meta/3', data: '3' }, { path: 'meta/4', data: '4' }], { metadata: { k: 'v' }, useOctetStream: true })
  assert.deepEqual(many.map((f) => f.metadata), [{ k: 'v' }, { k: 'v' }])
  await sbx.files.write('meta/2', 'again')
  assert.equal((await sbx.files.getInfo('meta/2')).metadata, undefined)
})
await check('files of every size and kind', async () => {
  for (const size of [0, 1, 4095, 4096, 4097, 262143, 262144, 262145, 5_000_000]) {
    const data = new Uint8Array(size).map((_, i) => i * 31)
    for (const opts of [{}, { useOctetStream: true }, { gzip: true }]) {
      await sbx.files.write('sized', new Blob([data]), opts)
      const back = await sbx.files.read('sized', { format: 'bytes', gzip: opts.gzip })
      assert(Buffer.compare(Buffer.from(back), Buffer.from(data)) === 0, `${size} bytes, ${JSON.stringify(opts)}`)
    }
  }
  const chunks = []
  for await (const c of await sbx.files.read('sized', { format: 'stream' })) chunks.push(c)
  assert.equal(Buffer.concat(chunks).length, 5_000_000)
})
await check('compose', async () => {
  await sbx.files.write([{ path: 'c/1', data: 'one ' }, { path: 'c/2', data: 'two' }])
  const res = await fetch(`${process.env.E2B_SANDBOX_URL}/files/compose`, {
    method: 'POST',
    body: JSON.stringify({ source_paths: ['c/1', 'c/2'], destination: 'c/whole' }),
  })
  assert.deepEqual(await res.json(), { name: 'whole', type: 'file', path: `${home}/c/whole` })
  assert.equal(await sbx.files.read('c/whole'), 'one two')
  assert.deepEqual((await sbx.files.list('c')).map((e) => e.name), ['whole'])
})
await check('directories', async () => {
  assert.equal(await sbx.files.makeDir('d/e'), true)
  assert.equal(await sbx.files.makeDir('d/e'), false)
  assert.equal(await sbx.files.exists('d/e'), true)
  assert.equal(await sbx.files.exists('d/nope'), false)
  await sbx.commands.run('ln -s /etc d/link')
  const list = await sbx.files.list('d')
  assert.deepEqual(list.map((e) => [e.name, e.type]), [['e', 'dir'], ['link', 'dir']])
  const info = await sbx.files.getInfo('dir/a.txt')
  assert.deepEqual([info.size, info.owner, info.permissions, info.mode], [6, 'nobody', '-rw-r--r--', 0o644])
  assert(Math.abs(info.modifiedTime - Date.now()) < 60_000)
  assert.equal((await sbx.files.rename('dir/a.txt', 'moved/b.txt')).path, `${home}/moved/b.txt`)
  await sbx.files.remove('d')
  assert.equal(await sbx.files.exists('d'), false)
  await sbx.files.remove('d') // is already true
  await assert.rejects(sbx.files.list('nope'), NotFoundError)
  await assert.rejects(sbx.files.list('moved/b.txt'), InvalidArgumentError)
  await assert.rejects(sbx.files.makeDir('moved/b.txt'), InvalidArgumentError)
  await assert.rejects(sbx.files.rename('nope', 'x'), NotFoundError)
  await assert.rejects(sbx.files.getInfo('nope'), NotFoundError)
  await sbx.files.write('t/1/2/3/f', '')
  assert.deepEqual((await sbx.files.list('t', { depth: 3 })).map((e) => e.path.slice(home.length)), ['/t/1', '/t/1/2', '/t/1/2/3'])
})
await check('watch', async () => {
  await sbx.files.makeDir('w')
  const seen = []
  const h = await sbx.files.watchDir('w', (e) => seen.push(`${e.type} ${e.name}`), { recursive: true, includeEntry: true })
  await sbx.files.write('w/sub/f', 'x')
  for (let i = 0; i < 100 && !seen.includes('create sub'); i++) await new Promise((r) => setTimeout(r, 20))
  assert(seen.includes('create sub'), `got ${seen}`)
  await h.stop()
  await assert.rejects(sbx.files.watchDir('w/sub/f', () => {}), InvalidArgumentError)
  await assert.rejects(sbx.files.watchDir('nope', () => {}), NotFoundError)
  const events = []
  const flat = await sbx.files.watchDir('w', (e) => events.push(e), { includeEntry: true })
  await sbx.files.write('w/deep/f', 'x')
  await sbx.files.write('w/one', 'x')
  await sbx.files.rename('w/one', 'w/two')
  await sbx.files.remove('w/two')
  const want = ['create deep', 'create one', 'write one', 'rename one', 'create two', 'remove two']
  const got = () => events.map((e) => `${e.type} ${e.name}`)
  for (let i = 0; i < 100 && !want.every((w) => got().includes(w)); i++) await new Promise((r) => setTimeout(r, 20))
  for (const w of want) assert(got().includes(w), `no ${w} in ${got()}`)
  assert(!got().some((g) => g.includes('/')), `below the directory: ${got()}`)
  assert.equal(events.find((e) => e.name === 'deep').entry.path, `${home}/w/deep`)
  await flat.stop()
})
await check('kill', async () => assert.equal(await sbx.kill(), true))
process.exit(0)
