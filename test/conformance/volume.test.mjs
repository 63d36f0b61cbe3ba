// Volumes as the official SDK uses them: their files without a sandbox, and
// mounted into several.
import assert from 'node:assert/strict'
import { createHash, randomBytes } from 'node:crypto'
import { after, before, describe, test } from 'node:test'
import * as e2b from 'e2b'
import { eventually, start } from './server.mjs'

const { Sandbox, Volume, VolumeFileType } = e2b
let server, volume

before(async () => {
  server = await start('--volume-size', '1536')
  volume = await Volume.create('shared')
})
after(async () => {
  await server?.stop()
})

/** content asks the content API itself, as no SDK would. */
async function content(method, path, { token = volume.token, id = volume.volumeId, body } = {}) {
  const r = await fetch(`${server.url}/volumecontent/${id}/${path}`, { method, headers: { Authorization: `Bearer ${token}` }, body, redirect: 'manual' })
  return { status: r.status, text: await r.text(), headers: r.headers }
}

describe('volumes', () => {
  test('are created, listed, found, connected to and destroyed', async () => {
    const v = await Volume.create('crud_1')
    assert.deepEqual([v.name, typeof v.token, v.token.length > 40], ['crud_1', 'string', true])
    const info = await Volume.getInfo(v.volumeId)
    assert.deepEqual([info.volumeId, info.name, info.token], [v.volumeId, 'crud_1', v.token])
    const list = await Volume.list()
    assert.deepEqual(list.map((e) => e.name), ['shared', 'crud_1'])
    assert.ok(list.every((e) => !('token' in e)))
    const again = await Volume.connect(v.volumeId)
    await again.writeFile('/a', 'by the second')
    assert.equal(await v.readFile('/a'), 'by the second')
    assert.equal(await Volume.destroy(v.volumeId), true)
    assert.equal(await Volume.destroy(v.volumeId), false)
    assert.deepEqual((await Volume.list()).map((e) => e.name), ['shared'])
  })

  test('that are missing, and taken or invalid names, give the errors of the SDK', async () => {
    assert.equal(await Volume.destroy('non-existent-id'), false)
    await assert.rejects(Volume.getInfo('non-existent-id'), e2b.VolumeNotFoundError)
    await assert.rejects(Volume.create('shared'), (e) => e instanceof e2b.VolumeError && /400.*'shared' already exists/.test(e.message))
    for (const name of ['', 'a b', '../x', 'é']) await assert.rejects(Volume.create(name), (e) => e instanceof e2b.VolumeError && /400/.test(e.message))
    const r = await server.api('POST', '/volumes', { name: 'x' }, { 'X-API-KEY': 'e2b_' + '0'.repeat(40) })
    assert.equal(r.status, 401)
  })
})

describe('files of a volume', () => {
  test('are written and read as text, bytes, blob and stream', async () => {
    const stat = await volume.writeFile('/test.txt', 'Hello, World!')
    assert.deepEqual([stat.name, stat.type, stat.path, stat.size, stat.mode, stat.uid], ['test.txt', VolumeFileType.FILE, '/test.txt', 13, 0o666, 1000])
    for (const k of ['atime', 'mtime', 'ctime']) assert.ok(stat[k] instanceof Date && Math.abs(stat[k] - Date.now()) < 300_000, k)
    assert.equal(await volume.readFile('/test.txt'), 'Hello, World!')
    assert.equal(await (await volume.readFile('/test.txt', { format: 'blob' })).text(), 'Hello, World!')
    assert.equal(await new Response(await volume.readFile('/test.txt', { format: 'stream' })).text(), 'Hello, World!')
    const bytes = randomBytes(100_000)
    await volume.writeFile('/bytes', bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length))
    assert.deepEqual(Buffer.from(await volume.readFile('/bytes', { format: 'bytes' })), bytes)
    await volume.writeFile('/stream', new Blob(['from a stream']).stream())
    assert.equal(await volume.readFile('/stream'), 'from a stream')
    await volume.writeFile('/blob', new Blob(['from a blob']))
    assert.equal(await volume.readFile('/blob'), 'from a blob')
  })

  test('may be empty, in every format', async () => {
    await volume.writeFile('/empty', '')
    assert.equal(await volume.readFile('/empty'), '')
    assert.equal((await volume.readFile('/empty', { format: 'bytes' })).length, 0)
    assert.equal((await volume.readFile('/empty', { format: 'blob' })).size, 0)
    assert.equal(await new Response(await volume.readFile('/empty', { format: 'stream' })).text(), '')
  })

  test('are not overwritten with force: false', async () => {
    await volume.writeFile('/twice', 'one')
    await assert.rejects(volume.writeFile('/twice', 'two', { force: false }), (e) => e instanceof e2b.VolumeError && /409/.test(e.message))
    await assert.rejects(volume.writeFile('/twice', 'two'), e2b.VolumeError)
    await volume.writeFile('/twice', 'two', { force: true })
    assert.equal(await volume.readFile('/twice'), 'two')
  })

  test('have owner and mode', async () => {
    const stat = await volume.writeFile('/meta', 'x', { uid: 1001, gid: 1002, mode: 0o644 })
    assert.deepEqual([stat.uid, stat.gid, stat.mode], [1001, 1002, 0o644])
    const updated = await volume.updateMetadata('/meta', { uid: 0, mode: 0o755 })
    assert.deepEqual([updated.uid, updated.gid, updated.mode, updated.path, updated.type], [0, 1002, 0o755, '/meta', VolumeFileType.FILE])
    await assert.rejects(volume.updateMetadata('/none', { mode: 0o644 }), e2b.VolumePathNotFoundError)
    await assert.rejects(volume.updateMetadata('/meta', { mode: 0o4755 }), (e) => /400/.test(e.message))
  })

  test('are in directories that are made, listed and removed', async () => {
    const dir = await volume.makeDir('/dir', { uid: 1000, gid: 1000, mode: 0o755 })
    assert.deepEqual([dir.type, dir.path, dir.mode, dir.uid], [VolumeFileType.DIRECTORY, '/dir', 0o755, 1000])
    await assert.rejects(volume.makeDir('/dir'), (e) => e instanceof e2b.VolumeError && /409/.test(e.message))
    await volume.makeDir('/dir', { force: true })
    await assert.rejects(volume.makeDir('/no/such/dir'), e2b.VolumePathNotFoundError)
    await volume.makeDir('/dir/deep/deeper', { force: true })
    await volume.writeFile('/dir/deep/deeper/file', 'x')
    await volume.writeFile('/dir/new/parents/file', 'x', { force: true })
    const paths = async (depth) => (await volume.list('/dir', { depth })).map((e) => e.path)
    assert.deepEqual(await paths(), ['/dir/deep', '/dir/new'])
    assert.deepEqual(await paths(3), ['/dir/deep', '/dir/deep/deeper', '/dir/deep/deeper/file', '/dir/new', '/dir/new/parents', '/dir/new/parents/file'])
    assert.equal((await volume.getInfo('/dir/deep')).type, VolumeFileType.DIRECTORY)
    await assert.rejects(volume.list('/none'), e2b.VolumePathNotFoundError)
    await volume.remove('/dir')
    assert.equal(await volume.exists('/dir'), false)
    assert.equal(await volume.exists('/'), true)
    await assert.rejects(volume.remove('/dir'), e2b.VolumePathNotFoundError)
    await assert.rejects(volume.readFile('/dir', { format: 'stream' }), e2b.VolumePathNotFoundError)
  })

  test('can be many, with any name', async () => {
    const v = await Volume.create('names')
    const box = await Sandbox.create({ volumeMounts: { '/mnt/v': v } })
    try {
      assert.deepEqual(await v.list('/'), [])
      await box.commands.run(`cd /mnt/v && python3 -c "
import os
for i in range(3000): open('file-%04d' % i, 'w')
for n in [b'new\\nline', b'\\xff\\xfe', b'-rf', b'<b>', 'ü'.encode()]: open(n, 'w')
os.utime('file-0000', (1 << 60, 1 << 60)) if os.path.exists('file-0000') else 0" || true`)
      const all = await v.list('/')
      assert.equal(all.length, 3005)
      const names = all.map((e) => e.name)
      for (const n of ['new\nline', '-rf', '<b>', 'ü', 'file-2999']) assert.ok(names.includes(n), n)
      await v.remove('/new\nline')
      assert.equal(await v.exists('/new\nline'), false)
    } finally {
      await box.kill()
    }
    assert.equal(await Volume.destroy(v.volumeId), true)
  })

  test('of 1 GiB stream in both directions with little memory in the server', async () => {
    const size = 1 << 30
    const block = randomBytes(1 << 20)
    const up = createHash('sha256')
    let sent = 0
    const before = memory()
    await volume.writeFile(
      '/big',
      new ReadableStream({
        pull(c) {
          if (sent === size) return c.close()
          block.writeUInt32LE(sent / block.length, 0)
          up.update(block)
          c.enqueue(new Uint8Array(block))
          sent += block.length
        },
      }),
      { requestTimeoutMs: 600_000 },
    )
    assert.equal((await volume.getInfo('/big')).size, size)
    const down = createHash('sha256')
    for await (const chunk of await volume.readFile('/big', { format: 'stream', requestTimeoutMs: 600_000 })) down.update(chunk)
    assert.equal(down.digest('hex'), up.digest('hex'))
    const grown = memory() - before
    assert.ok(grown < 256 << 20, `the server grew by ${grown >> 20} MiB`)
    // A full volume refuses a file and keeps no part of it.
    await assert.rejects(volume.writeFile('/more', new Blob([new Uint8Array(700 << 20)]), { requestTimeoutMs: 600_000 }), (e) => e instanceof e2b.VolumeError && /507/.test(e.message))
    assert.equal(await volume.exists('/more'), false)
    await volume.remove('/big')
  })

  test('need the token of their own volume', async () => {
    const other = await Volume.create('other')
    assert.equal((await content('GET', 'path?path=/')).status, 200)
    for (const [name, o] of Object.entries({
      'of another volume': { token: other.token },
      'the project key': { token: server.key },
      none: { token: '' },
      'for another volume': { id: other.volumeId },
      'for none': { id: 'vol_AAAAAAAAAAAAAAAAAAAAAAAAAA' },
      'for a path': { id: '..%2f..%2fetc' },
    })) {
      for (const [method, path] of [['GET', 'file?path=/test.txt'], ['PUT', 'file?path=/x'], ['DELETE', 'path?path=/test.txt'], ['GET', 'dir?path=/'], ['POST', 'dir?path=/x'], ['PATCH', 'path?path=/x']]) {
        const r = await content(method, path, { ...o, body: method === 'PATCH' ? '{}' : undefined })
        assert.equal(r.status, 401, `${name}: ${method} ${path}: ${r.text}`)
      }
    }
    const byKey = await fetch(`${server.url}/volumecontent/${volume.volumeId}/path?path=/`, { headers: { 'X-API-KEY': server.key } })
    assert.equal(byKey.status, 401)
    await Volume.destroy(other.volumeId)
    assert.equal((await content('GET', 'path?path=/', { token: other.token, id: other.volumeId })).status, 404)
    assert.equal(await volume.exists('/test.txt'), true)
  })

  test('are refused with the name of the invalid field', async () => {
    for (const [method, path, want, names] of [
      ['GET', 'path', 400, 'path'],
      ['GET', 'dir?path=/&depth=x', 400, 'depth'],
      ['GET', 'dir?path=/&depth=11', 400, 'depth'],
      ['PUT', 'file?path=/a&mode=-1', 400, 'mode'],
      ['PUT', 'file?path=/a&uid=4294967296', 400, 'uid'],
      ['PUT', 'file?path=/a&force=perhaps', 400, 'force'],
      ['PUT', 'file?path=/a%00b', 400, 'path'],
      ['DELETE', 'path?path=/', 400, 'root'],
      ['DELETE', 'path?path=/..', 400, 'root'],
      ['PATCH', 'path?path=/test.txt', 400, 'body'],
    ]) {
      const r = await content(method, path, { body: method === 'PATCH' ? '{"size": 1}' : undefined })
      assert.equal(r.status, want, `${method} ${path}: ${r.text}`)
      assert.equal(JSON.parse(r.text).code, want)
      assert.match(r.text, new RegExp(names))
    }
    const r = await content('GET', 'file?path=/test.txt')
    assert.deepEqual([r.headers.get('content-type'), r.headers.get('x-content-type-options')], ['application/octet-stream', 'nosniff'])
  })
})

describe('volumes in sandboxes', () => {
  test('are shared at once and outlive the sandboxes', async () => {
    const v = await Volume.create('mounted')
    await v.writeFile('/before', 'by the API')
    await volume.writeFile('/mounted.txt', 'by the API too')
    const mount = { '/mnt/my data': v, '/home/user/other': 'shared' }
    const [a, b] = await Promise.all([Sandbox.create({ volumeMounts: mount }), Sandbox.create({ volumeMounts: { '/data': 'mounted' } })])
    try {
      assert.deepEqual((await a.getInfo()).volumeMounts.sort((x, y) => (x.name < y.name ? -1 : 1)), [
        { name: 'mounted', path: '/mnt/my data' },
        { name: 'shared', path: '/home/user/other' },
      ])
      const run = (box, cmd, user) => box.commands.run(cmd, { user }).then((r) => r.stdout)
      assert.equal(await run(a, 'cat "/mnt/my data/before"'), 'by the API')
      assert.equal(await a.files.read('/home/user/other/mounted.txt'), 'by the API too')
      // Each change is seen by the others at once: content, size, names, modes.
      for (let i = 0; i < 5; i++) {
        await run(a, `echo a${i} >>"/mnt/my data/log"`)
        assert.equal((await run(b, 'tail -1 /data/log')).trim(), `a${i}`)
        await run(b, `echo b${i} >>/data/log`)
        assert.equal((await run(a, 'tail -1 "/mnt/my data/log"')).trim(), `b${i}`)
        assert.match(await v.readFile('/log'), new RegExp(`a${i}\nb${i}\n$`))
        await v.writeFile('/api', `round ${i}`, { force: true })
        assert.equal(await run(a, 'cat "/mnt/my data/api"'), `round ${i}`)
        assert.equal(await run(b, 'cat /data/api; stat -c %s /data/api >/dev/null'), `round ${i}`)
      }
      await run(b, 'mkdir /data/dir && mv /data/log /data/dir/moved && chmod 640 /data/dir/moved && ln -s dir/moved /data/link')
      assert.equal(await run(a, 'stat "/mnt/my data/dir/moved" >/dev/null; stat -c "%a %U" "/mnt/my data/dir/moved"; ls "/mnt/my data"'), '640 user\napi\nbefore\ndir\nlink\n')
      const link = await v.getInfo('/link')
      assert.deepEqual([link.type, link.target], [VolumeFileType.SYMLINK, 'dir/moved'])
      // Memory that both map; locks; programs.
      await run(a, `cd "/mnt/my data" && python3 -c "
import mmap; f=open('map','w+b'); f.truncate(4096); m=mmap.mmap(f.fileno(),4096); m[:5]=b'hello'; m.flush()"`)
      assert.equal(await run(b, 'head -c 5 /data/map'), 'hello')
      assert.equal(await run(b, 'cp /bin/echo /data/program && /data/program it runs'), 'it runs\n')
      assert.equal(await run(a, '"/mnt/my data/program" here too'), 'here too\n')
      assert.equal(await run(a, 'cd "/mnt/my data" && git init -q repo 2>&1 && cd repo && git -c user.name=x -c user.email=x@x commit -q --allow-empty -m x && git log --oneline | wc -l'), '1\n')
      // A mounted volume cannot be destroyed.
      await assert.rejects(Volume.destroy(v.volumeId), (e) => e instanceof e2b.VolumeError && /409/.test(e.message))
    } finally {
      await Promise.all([a.kill(), b.kill()])
    }
    const c = await Sandbox.create({ volumeMounts: { '/mnt/again': v } })
    assert.match((await c.commands.run('cat /mnt/again/dir/moved')).stdout, /^a0\nb0\n/)
    await c.kill()
    // Where it was mounted nothing is left in the template.
    const d = await Sandbox.create()
    assert.equal((await d.commands.run('ls /mnt /data 2>&1; ls /home/user')).stdout.includes('other'), false)
    await assert.rejects(d.commands.run('ls /data'), /./)
    await d.kill()
    assert.equal(await Volume.destroy(v.volumeId), true)
  })

  test('are refused at invalid paths', async () => {
    const refused = (volumeMounts, names) =>
      assert.rejects(Sandbox.create({ volumeMounts }), (e) => /400/.test(e.message) && names.test(e.message), JSON.stringify(volumeMounts))
    await refused({ '/mnt/x': 'no-such-volume' }, /no-such-volume/)
    for (const path of ['relative', '/mnt/../etc', '/', '/proc/x', '/usr/local/sbin', '/home', '/mnt/']) await refused({ [path]: 'shared' }, /path/)
    await refused({ '/mnt/a': 'shared', '/mnt/a/b': 'shared' }, /overlap/)
    await refused(Object.fromEntries(Array.from({ length: 17 }, (_, i) => [`/mnt/${i}`, 'shared'])), /at most 16 are allowed/)
  })

  test('keep to their size, and hostile content in them is harmless', async () => {
    const v = await Volume.create('hostile')
    const box = await Sandbox.create({ volumeMounts: { '/mnt/v': v } })
    const root = (cmd) => box.commands.run(cmd, { user: 'root', timeoutMs: 600_000 })
    try {
      await root(`cd /mnt/v && ln -s /etc/shadow shadow && ln -s ../../../../../../../etc/shadow up && ln -s / slash && mkfifo fifo &&
        python3 -c "import socket; socket.socket(socket.AF_UNIX).bind('sock')"; cp /bin/true suid && chmod 6755 suid; mknod null c 1 3; true`)
      for (const p of ['/shadow', '/up', '/slash/etc/shadow', '/fifo', '/sock', '/null']) {
        if (p !== '/slash/etc/shadow' && !(await v.exists(p))) continue // the gofer makes no pipes, sockets and devices; volume.TestHostileFiles has them
        const r = await content('GET', `file?path=${p}`, { id: v.volumeId, token: v.token })
        assert.equal(r.status, 400, `${p}: ${r.text}`)
      }
      assert.equal((await v.list('/slash').catch((e) => e)) instanceof e2b.VolumeError, true)
      const fill = await root('head -c 3G /dev/zero >/mnt/v/filler; df -m --output=size,avail /mnt/v | tail -1').catch((e) => e)
      assert.match(fill.stderr, /No space left on device/)
      await assert.rejects(v.writeFile('/more', new Blob([new Uint8Array(8 << 20)]), { requestTimeoutMs: 600_000 }), /507/)
      assert.equal((await box.commands.run('echo alive')).stdout, 'alive\n')
      await root('rm /mnt/v/filler && head -c 1M /dev/zero >/mnt/v/fits')
    } finally {
      await box.kill()
    }
    await Volume.destroy(v.volumeId)
  })

  test('are shared with forks', async () => {
    const box = await Sandbox.create({ volumeMounts: { '/mnt/shared': volume } })
    const [fork] = await box.fork()
    if (fork instanceof Error) throw fork
    try {
      await fork.commands.run('echo from the fork >/mnt/shared/fork')
      assert.equal((await box.commands.run('cat /mnt/shared/fork')).stdout, 'from the fork\n')
    } finally {
      await Promise.all([box.kill(), fork.kill()])
    }
  })

  test('are still mounted after pause and resume', async () => {
    const v = await Volume.create('paused')
    const box = await Sandbox.create({ volumeMounts: { '/mnt/v': v } })
    await box.commands.run('echo one >/mnt/v/f; (exec 9>>/mnt/v/open; while sleep 0.2; do date +%s.%N >&9; done) >/dev/null 2>&1 &')
    for (let i = 0; i < 3; i++) {
      await box.pause()
      await v.writeFile(`/by-api-${i}`, `round ${i}`)
      await box.connect()
      assert.equal((await box.commands.run(`cat /mnt/v/f /mnt/v/by-api-${i}`)).stdout, `one\nround ${i}`)
      const lines = async () => (await v.readFile('/open')).split('\n').length
      const had = await lines()
      await eventually('its open file goes on', async () => (await lines()) > had)
    }
    await box.pause()
    await assert.rejects(Volume.destroy(v.volumeId), (e) => e instanceof e2b.VolumeError && /409/.test(e.message))
    await box.kill()
    assert.equal(await Volume.destroy(v.volumeId), true)
  })
})

/** memory returns the server's resident bytes that are not of files. */
function memory() {
  return server.memory()
}

test('postern volume lists volumes', async () => {
  assert.match(await server.postern('volume', 'create', 'by-hand'), /volume {2}by-hand \(vol_[A-Z2-7]+\), holds 1536 MiB/)
  assert.match(await server.postern('volume', 'list'), /by-hand +vol_\S+ +\d+ MiB +1536 MiB/)
  assert.match(await server.postern('volume', 'ls', 'shared'), /file +0666 +1000:1000 +13 +\S+ \S+ +\/test.txt/)
  await assert.rejects(server.postern('volume', 'ls', 'shared', '/none'), /there is no "\/none" in volume shared/)
  await assert.rejects(server.postern('volume', 'ls', 'none'), /there is no volume "none"/)
  assert.match(await server.postern('volume', 'delete', 'by-hand'), /deleted by-hand/)
})
