// The data plane as the official SDK uses it: commands, terminals, files,
// watches and signed URLs.
import assert from 'node:assert/strict'
import { createHash, randomBytes } from 'node:crypto'
import { after, before, describe, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import * as e2b from 'e2b'
import { collector, eventually, start } from './server.mjs'

const { Sandbox } = e2b
const sha256 = (b) => createHash('sha256').update(b).digest('hex')
let server, box

before(async () => {
  server = await start()
  box = await Sandbox.create({ timeoutMs: 1200_000, envs: { COLOUR: 'green', SIZE: 'small' } })
})
after(async () => {
  await box?.kill()
  await server?.stop()
})

describe('commands', () => {
  test('answer with stdout, stderr and the exit code', async () => {
    const r = await box.commands.run('echo out; echo err >&2')
    assert.deepEqual([r.stdout, r.stderr, r.exitCode], ['out\n', 'err\n', 0])
  })

  test('that fail are CommandExitError with what they printed', async () => {
    const err = await box.commands.run('echo before; echo why >&2; exit 7').catch((e) => e)
    assert.ok(err instanceof e2b.CommandExitError, `${err}`)
    assert.deepEqual([err.exitCode, err.stdout, err.stderr], [7, 'before\n', 'why\n'])
  })

  test('see the environment of the sandbox, overridden for one call only', async () => {
    const show = 'echo $COLOUR $SIZE $HOME $USER $LOGNAME $E2B_SANDBOX $E2B_SANDBOX_ID'
    const want = (colour) => `${colour} small /home/user user user true ${box.sandboxId}\n`
    assert.equal((await box.commands.run(show, { envs: { COLOUR: 'red' } })).stdout, want('red'))
    assert.equal((await box.commands.run(show)).stdout, want('green'))
  })

  test('run in a login shell of the user, or of root, or in another directory on request', async () => {
    assert.equal((await box.commands.run('whoami; pwd; shopt -q login_shell && echo login')).stdout, 'user\n/home/user\nlogin\n')
    assert.equal((await box.commands.run('whoami; pwd', { user: 'root' })).stdout, 'root\n/root\n')
    assert.equal((await box.commands.run('pwd', { cwd: '/usr/lib' })).stdout, '/usr/lib\n')
  })

  test('in a directory that is not there are refused as InvalidArgumentError, an unknown user as AuthenticationError', async () => {
    await assert.rejects(box.commands.run('true', { cwd: '/no/such' }), (e) => e instanceof e2b.InvalidArgumentError && /\/no\/such/.test(e.message))
    await assert.rejects(box.commands.run('true', { user: 'nobody-here' }), e2b.AuthenticationError)
  })

  test('stream what they print while they run', async () => {
    const out = collector()
    const err = collector()
    let done = false
    const run = box.commands
      .run('echo one; until [ -e go-on ]; do sleep 0.1; done; echo two; echo three >&2', { onStdout: out.add, onStderr: err.add })
      .then((r) => ((done = true), r))
    await eventually('the first line', () => out.text() === 'one\n')
    assert.equal(done, false)
    await box.files.write('go-on', '')
    const r = await run
    assert.deepEqual([out.text(), err.text(), r.stdout], ['one\ntwo\n', 'three\n', 'one\ntwo\n'])
  })

  test('do not split characters between chunks', async () => {
    const r = await box.commands.run(`python3 -c "print('ř€😀' * 200000)"`)
    assert.equal(r.stdout, 'ř€😀'.repeat(200_000) + '\n')
  })

  test('run in the background, are listed, connected to, and killed', async () => {
    const handle = await box.commands.run('echo begin; sleep 300', { background: true, timeoutMs: 0 })
    const listed = (await box.commands.list()).find((p) => p.pid === handle.pid)
    assert.equal(listed.cmd, '/bin/bash')
    assert.deepEqual(listed.args, ['-l', '-c', 'echo begin; sleep 300'])
    const again = await box.commands.connect(handle.pid)
    assert.equal(again.pid, handle.pid)
    assert.equal(await again.kill(), true)
    await assert.rejects(handle.wait(), (e) => e instanceof e2b.CommandExitError && /killed/.test(e.error ?? e.message))
    await eventually('its end in the list', async () => !(await box.commands.list()).some((p) => p.pid === handle.pid))
    assert.equal(await box.commands.kill(handle.pid), false)
  })

  test('go on after their client has disconnected', async () => {
    const handle = await box.commands.run('sleep 2; echo finished >left', { background: true })
    await handle.disconnect()
    await eventually('the end of the command', () => box.files.exists('left'))
    assert.equal(await box.files.read('left'), 'finished\n')
  })

  test('can be connected to by two at once, who both see the end', async () => {
    const handle = await box.commands.run('until [ -e both-here ]; do sleep 0.1; done; echo late; exit 3', { background: true })
    const out = collector()
    const other = await box.commands.connect(handle.pid, { onStdout: out.add })
    await box.files.write('both-here', '')
    const ends = await Promise.allSettled([handle.wait(), other.wait()])
    assert.deepEqual(ends.map((e) => e.reason?.exitCode), [3, 3])
    assert.equal(out.text(), 'late\n')
  })

  test('of an unknown process: connect is NotFoundError, stdin too, kill is false', async () => {
    await assert.rejects(box.commands.connect(999999), e2b.NotFoundError)
    await assert.rejects(box.commands.sendStdin(999999, 'x'), e2b.NotFoundError)
    assert.equal(await box.commands.kill(999999), false)
  })

  test('read what is sent to their stdin, until it is closed', async () => {
    const handle = await box.commands.run('cat', { background: true, stdin: true })
    await box.commands.sendStdin(handle.pid, 'first ')
    await box.commands.sendStdin(handle.pid, 'second €')
    await box.commands.sendStdin(handle.pid, '')
    await box.commands.closeStdin(handle.pid)
    assert.equal((await handle.wait()).stdout, 'first second €')
  })

  test('have no stdin unless it was requested', async () => {
    assert.equal((await box.commands.run('cat; echo eof')).stdout, 'eof\n')
  })

  test('are ended by their timeout, which the error names', async () => {
    await assert.rejects(box.commands.run('sleep 3217; true', { timeoutMs: 1000 }), (e) => e instanceof e2b.TimeoutError && /timeoutMs/.test(e.message))
    await eventually('the end of the process', async () => (await box.commands.run("grep -l '[3]217' /proc/[0-9]*/cmdline || true")).stdout === '')
  })

  test('are cancelled by an abort signal', async () => {
    const abort = new AbortController()
    setTimeout(() => abort.abort(), 500)
    await assert.rejects(box.commands.run('sleep 30', { signal: abort.signal, timeoutMs: 0 }))
  })

  test('run twenty at a time', async () => {
    const got = await Promise.all(Array.from({ length: 20 }, (_, i) => box.commands.run(`sleep 0.2; echo ${i}`)))
    assert.deepEqual(got.map((r) => r.stdout), Array.from({ length: 20 }, (_, i) => `${i}\n`))
  })

  test('that print 64 MiB lose nothing', async () => {
    const n = 64 << 20
    const hash = createHash('sha256')
    let got = 0
    await box.commands.run(`yes 0123456789abcde | head -c ${n}`, {
      timeoutMs: 300_000,
      onStdout: (s) => {
        got += s.length
        hash.update(s)
      },
    })
    assert.equal(got, n)
    assert.equal(hash.digest('hex'), sha256(Buffer.alloc(n, '0123456789abcde\n')))
  })
})

describe('terminals', () => {
  test('have the requested size, take input and resize', async () => {
    const out = collector()
    const pty = await box.pty.create({ cols: 91, rows: 27, onData: out.add, envs: { PS1: '$ ', MOOD: 'calm' }, cwd: '/tmp' })
    await box.pty.sendInput(pty.pid, Buffer.from('stty size; echo $TERM $MOOD $PWD\n'))
    await eventually('the size', () => /27 91\r\nxterm-256color calm \/tmp\r\n/.test(out.text()))
    await box.pty.resize(pty.pid, { cols: 120, rows: 40 })
    await box.pty.sendInput(pty.pid, Buffer.from('stty size\n'))
    await eventually('the new size', () => /40 120\r\n/.test(out.text()))
    await box.pty.sendInput(pty.pid, Buffer.from('exit 5\n'))
    await assert.rejects(pty.wait(), (e) => e.exitCode === 5)
  })

  test('deliver Ctrl-C, can be reconnected to, and can be killed', async () => {
    const out = collector()
    const pty = await box.pty.create({ cols: 80, rows: 24, onData: out.add, user: 'root', timeoutMs: 0 })
    await box.pty.sendInput(pty.pid, Buffer.from('whoami; sleep 4321\n'))
    await eventually('the shell of root', () => /\rroot\r\n/.test(out.text()))
    // Until then Ctrl-C is the shell's, which waits for it all the same.
    await eventually('what it runs', async () => (await box.commands.run("grep -l '[4]321' /proc/[0-9]*/cmdline || true")).stdout !== '')
    await pty.disconnect()
    const more = collector()
    const again = await box.pty.connect(pty.pid, { onData: more.add, timeoutMs: 0 })
    await box.pty.sendInput(pty.pid, Buffer.from('\x03'))
    await box.pty.sendInput(pty.pid, Buffer.from('echo still $((40 + 2))\n'))
    await eventually('the shell after Ctrl-C', () => /still 42/.test(more.text()))
    assert.equal(await box.pty.kill(pty.pid), true)
    await assert.rejects(again.wait())
    assert.equal(await box.pty.kill(pty.pid), false)
  })
})

describe('files', () => {
  test('are written and read as text, bytes, blob and stream', async () => {
    const bytes = randomBytes(100_000)
    const info = await box.files.write('dir/of/bytes', new Blob([bytes]))
    assert.deepEqual([info.name, info.type, info.path], ['bytes', 'file', '/home/user/dir/of/bytes'])
    assert.deepEqual(Buffer.from(await box.files.read('dir/of/bytes', { format: 'bytes' })), bytes)
    assert.deepEqual(Buffer.from(await (await box.files.read('dir/of/bytes', { format: 'blob' })).arrayBuffer()), bytes)
    const parts = []
    for await (const part of await box.files.read('dir/of/bytes', { format: 'stream' })) parts.push(part)
    assert.deepEqual(Buffer.concat(parts), bytes)
    await box.files.write('text', 'Příliš žluťoučký kůň €')
    assert.equal(await box.files.read('text'), 'Příliš žluťoučký kůň €')
  })

  for (const opts of [{}, { gzip: true }, { useOctetStream: true }, { useOctetStream: true, gzip: true }, { useOctetStream: false }])
    test(`go both ways with ${JSON.stringify(opts)}`, async () => {
      const bytes = Buffer.concat([randomBytes(50_000), Buffer.alloc(500_000, 'a')])
      await box.files.write('/tmp/way', bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length), opts)
      assert.deepEqual(Buffer.from(await box.files.read('/tmp/way', { format: 'bytes', gzip: opts.gzip })), bytes)
    })

  test('can be empty, in every format', async () => {
    await box.files.write('empty', '')
    assert.equal(await box.files.read('empty'), '')
    assert.equal((await box.files.read('empty', { format: 'bytes' })).length, 0)
    assert.equal((await (await box.files.read('empty', { format: 'blob' })).arrayBuffer()).byteLength, 0)
  })

  test('many are written in one call, with the parents that they need, anywhere', async () => {
    const files = Array.from({ length: 50 }, (_, i) => ({ path: i % 2 ? `many/${i % 7}/${i}` : `/many/${i}/file`, data: `content ${i}` }))
    const infos = await box.files.write(files)
    assert.deepEqual(infos.map((f) => f.path), files.map((f) => (f.path[0] === '/' ? f.path : `/home/user/${f.path}`)))
    for (const f of files) assert.equal(await box.files.read(f.path), f.data)
    assert.equal((await box.commands.run('stat -c "%U %G" /many /many/0/file many/1')).stdout, 'user user\n'.repeat(3))
    assert.deepEqual(await box.files.write([]), [])
  })

  test('of root are its own', async () => {
    const info = await box.files.write('of-root', 'x', { user: 'root' })
    assert.equal(info.path, '/root/of-root')
    assert.equal((await box.commands.run('stat -c %U /root/of-root', { user: 'root' })).stdout, 'root\n')
  })

  test('of 64 MiB stream both ways and keep every byte', async () => {
    const n = 64 << 20
    const bytes = randomBytes(n)
    await box.files.write('big', new Blob([bytes]), { requestTimeoutMs: 300_000 })
    assert.equal((await box.commands.run('sha256sum <big')).stdout.split(' ')[0], sha256(bytes))
    const hash = createHash('sha256')
    let got = 0
    for await (const part of await box.files.read('big', { format: 'stream', requestTimeoutMs: 300_000 })) {
      hash.update(part)
      got += part.length
    }
    assert.deepEqual([got, hash.digest('hex')], [n, sha256(bytes)])
    // The same with a body of unknown length.
    const chunk = bytes.subarray(0, 1 << 20)
    let left = 64
    const stream = new ReadableStream({ pull: (c) => (left-- > 0 ? c.enqueue(chunk) : c.close()) })
    await box.files.write('big2', stream, { requestTimeoutMs: 300_000 })
    assert.equal((await box.commands.run('sha256sum <big2; rm big big2')).stdout.split(' ')[0], sha256(Buffer.concat(Array(64).fill(chunk))))
  })

  test('keep their metadata, replaced by each write, shown by write, info, list and rename', async () => {
    const written = await box.files.write('tagged', 'x', { metadata: { author: 'ada', purpose: 'show it' } })
    assert.deepEqual(written.metadata, { author: 'ada', purpose: 'show it' })
    assert.deepEqual((await box.files.getInfo('tagged')).metadata, { author: 'ada', purpose: 'show it' })
    assert.deepEqual((await box.files.list('.')).find((f) => f.name === 'tagged').metadata, { author: 'ada', purpose: 'show it' })
    assert.deepEqual((await box.files.rename('tagged', 'tagged2')).metadata, { author: 'ada', purpose: 'show it' })
    await box.files.write('tagged2', 'y', { metadata: { author: 'bob' }, useOctetStream: true })
    assert.deepEqual((await box.files.getInfo('tagged2')).metadata, { author: 'bob' })
    await box.files.write('tagged2', 'z')
    assert.equal((await box.files.getInfo('tagged2')).metadata, undefined)
  })

  test('are described: type, size, mode, owner, time, target of a link', async () => {
    await box.commands.run('rm -rf kinds; mkdir kinds; cd kinds; printf 12345 >file; chmod 640 file; ln -s file link; ln -s nowhere dangling; mkdir -m 700 sub')
    const file = await box.files.getInfo('kinds/file')
    assert.deepEqual(
      [file.type, file.size, file.mode & 0o777, file.permissions, file.owner, file.group, file.path],
      ['file', 5, 0o640, '-rw-r-----', 'user', 'user', '/home/user/kinds/file'],
    )
    assert.ok(Math.abs(Date.now() - file.modifiedTime.getTime()) < 60_000)
    const link = await box.files.getInfo('kinds/link')
    assert.equal(link.symlinkTarget, '/home/user/kinds/file')
    const names = (await box.files.list('kinds')).map((e) => [e.name, e.type])
    assert.deepEqual(names.find((n) => n[0] === 'sub'), ['sub', 'dir'])
    assert.deepEqual(names.map((n) => n[0]).sort(), ['dangling', 'file', 'link', 'sub'])
  })

  test('are listed to the requested depth', async () => {
    await box.files.write('tree/a/b/c', 'x')
    const names = async (depth) => (await box.files.list('tree', { depth })).map((e) => e.path.slice('/home/user/tree/'.length)).sort()
    assert.deepEqual(await names(1), ['a'])
    assert.deepEqual(await names(2), ['a', 'a/b'])
    assert.deepEqual(await names(9), ['a', 'a/b', 'a/b/c'])
    await assert.rejects(box.files.list('tree', { depth: 0 }), e2b.InvalidArgumentError)
    await assert.rejects(box.files.list('no-such'), e2b.NotFoundError)
    await assert.rejects(box.files.list('text'), e2b.InvalidArgumentError)
  })

  test('are created, moved and removed', async () => {
    assert.equal(await box.files.makeDir('made/deep'), true)
    assert.equal(await box.files.makeDir('made/deep'), false)
    await box.files.write('made/deep/f', 'x')
    const moved = await box.files.rename('made/deep', 'moved')
    assert.deepEqual([moved.name, moved.type, moved.path], ['moved', 'dir', '/home/user/moved'])
    assert.equal(await box.files.exists('made/deep/f'), false)
    assert.equal(await box.files.read('moved/f'), 'x')
    await box.files.remove('moved')
    assert.equal(await box.files.exists('moved'), false)
    await assert.rejects(box.files.rename('no-such', 'x'), e2b.NotFoundError)
    await box.files.remove('no-such') // as rm -rf would
  })

  test('that are missing give another error than directories', async () => {
    await assert.rejects(box.files.read('no-such'), e2b.NotFoundError)
    await assert.rejects(box.files.getInfo('no-such'), e2b.NotFoundError)
    await assert.rejects(box.files.read('/usr'), e2b.InvalidArgumentError)
    await assert.rejects(box.files.read('text', { user: 'nobody-here' }), e2b.AuthenticationError)
    await assert.rejects(box.files.write('/usr', 'x'), e2b.SandboxError)
  })
})

describe('watches', () => {
  test('report what happens in a directory, and stop', async () => {
    await box.files.makeDir('watched')
    const events = []
    const watch = await box.files.watchDir('watched', (e) => void events.push(`${e.type} ${e.name}`), { timeoutMs: 0 })
    await box.files.write('watched/f', '1')
    await eventually('create', () => events.includes('create f') && events.includes('chmod f') && events.includes('write f'))
    await box.files.rename('watched/f', 'watched/g')
    await eventually('rename', () => events.includes('rename f') && events.includes('create g'))
    await box.commands.run('chmod 600 watched/g; rm watched/g')
    await eventually('chmod and remove', () => events.includes('chmod g') && events.includes('remove g'))
    await watch.stop()
    await box.files.write('watched/h', '1')
    await sleep(300)
    assert.deepEqual(events.filter((e) => e.endsWith(' h')), [])
  })

  test('can be recursive, include directories created later, and describe the entry', async () => {
    await box.files.makeDir('deep/one')
    const events = []
    const watch = await box.files.watchDir('deep', (e) => void events.push(e), { recursive: true, includeEntry: true, timeoutMs: 0 })
    await box.files.write('deep/one/f', '1')
    const event = await eventually('event below', () => events.find((e) => e.name === 'one/f' && e.type === 'write'))
    assert.deepEqual([event.entry.type, event.entry.path], ['file', '/home/user/deep/one/f'])
    await box.files.makeDir('deep/two')
    await eventually('the new directory', () => events.some((e) => e.name === 'two'))
    await eventually('event in the new directory', async () => {
      await box.files.write('deep/two/g', '1') // what is written before it is watched is not told
      return events.some((e) => e.name === 'two/g')
    })
    await watch.stop()
  })

  test('of a missing path or a file are refused', async () => {
    await assert.rejects(box.files.watchDir('no-such', () => {}), e2b.NotFoundError)
    await assert.rejects(box.files.watchDir('text', () => {}), e2b.InvalidArgumentError)
  })

  test('end at their timeout', async () => {
    let end
    await box.files.watchDir('watched', () => {}, { timeoutMs: 500, onExit: (e) => (end = e ?? true) })
    await eventually('the end', () => end)
    assert.ok(end === true || end instanceof e2b.TimeoutError, `${end}`)
  })
})

describe('signed URLs', () => {
  test('read and write without a key, until they expire', async () => {
    const up = await box.uploadUrl('signed', { useSignatureExpiration: 60 })
    const form = new FormData()
    form.append('file', new Blob(['signed text']))
    const put = await fetch(up, { method: 'POST', body: form })
    assert.deepEqual([put.status, await put.json()], [200, [{ name: 'signed', path: '/home/user/signed', type: 'file' }]])
    const down = await fetch(await box.downloadUrl('signed'))
    assert.deepEqual([down.status, await down.text()], [200, 'signed text'])
    const part = await fetch(await box.downloadUrl('signed'), { headers: { Range: 'bytes=7-' } })
    assert.deepEqual([part.status, await part.text()], [206, 'text'])
  })

  test('that expired, were changed, are for the other direction or of a killed sandbox are refused', async () => {
    const old = await fetch(await box.downloadUrl('signed', { useSignatureExpiration: -10 }))
    assert.deepEqual([old.status, await old.json()], [401, { code: 401, message: 'signature is already expired' }])
    const down = await box.downloadUrl('signed')
    for (const [what, url, method] of [
      ['another path', down.replace('signed', 'text'), 'GET'],
      ['the other direction', down, 'POST'],
      ['another signature', down.replace(/signature=v1_.{4}/, 'signature=v1_AAAA'), 'GET'],
      ['no signature', down.replace(/signature=[^&]*/, ''), 'GET'],
    ]) {
      const r = await fetch(url, { method, body: method === 'POST' ? 'x' : undefined })
      // 502: no sandbox is found that the signature could be of.
      assert.ok([400, 401, 404, 502].includes(r.status), `${what}: ${r.status}`)
    }
    const other = await Sandbox.create()
    const url = await other.downloadUrl('/etc/hostname')
    assert.equal((await fetch(url)).status, 200)
    await other.kill()
    assert.notEqual((await fetch(url)).status, 200)
  })
})

describe('a killed sandbox', () => {
  test('is SandboxNotFoundError for commands, not running, and ends what ran in it', async () => {
    const other = await Sandbox.create()
    const handle = await other.commands.run('sleep 300', { background: true, timeoutMs: 0 })
    const end = handle.wait().catch((e) => e)
    assert.equal(await other.kill(), true)
    assert.ok((await end) instanceof Error)
    assert.equal(await other.isRunning(), false)
    await assert.rejects(other.commands.run('true'), (e) => e instanceof e2b.SandboxNotFoundError || e instanceof e2b.TimeoutError)
    await assert.rejects(other.files.read('/etc/hostname'), (e) => e instanceof e2b.SandboxNotFoundError || e instanceof e2b.TimeoutError)
  })

  test('of another owner is closed: a wrong access token opens nothing', async () => {
    const wrong = await fetch(`${server.url}/files?path=/etc/hostname`, {
      headers: { 'E2b-Sandbox-Id': box.sandboxId, 'E2b-Sandbox-Port': '49983', 'X-Access-Token': 'guess' },
    })
    assert.equal(wrong.status, 401)
  })
})
