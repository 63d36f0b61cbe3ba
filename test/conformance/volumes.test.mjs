// Volumes with the official SDK: created, filled, mounted, shared and destroyed.
import assert from 'node:assert/strict'
import { createHash, randomBytes } from 'node:crypto'
import { after, before, describe, test } from 'node:test'
import * as e2b from 'e2b'
import { start } from './server.mjs'

const { Sandbox, Volume } = e2b
let server, volume
before(async () => {
  server = await start()
  volume = await Volume.create('data')
})
after(async () => {
  await server?.stop()
})

describe('volumes', () => {
  test('are created, found, listed and destroyed', async () => {
    const other = await Volume.create('other_one-2')
    assert.ok(other.volumeId && other.token)
    const info = await Volume.getInfo(other.volumeId)
    assert.deepEqual([info.volumeId, info.name], [other.volumeId, 'other_one-2'])
    assert.deepEqual((await Volume.list()).map((v) => v.name).sort(), ['data', 'other_one-2'])
    assert.equal(await Volume.destroy(other.volumeId), true)
    assert.equal(await Volume.destroy(other.volumeId), false)
    await assert.rejects(Volume.getInfo(other.volumeId), e2b.VolumeNotFoundError)
    await assert.rejects(Volume.connect(other.volumeId), e2b.VolumeNotFoundError)
  })

  test('refuse names that are taken or invalid', async () => {
    await assert.rejects(Volume.create('data'), e2b.VolumeError)
    for (const name of ['', 'a/b', '../x', 'sp ace', 'é']) await assert.rejects(Volume.create(name), e2b.VolumeError, name)
  })

  test('keep files, of any size and in every format', async () => {
    const bytes = randomBytes(8 << 20)
    await volume.writeFile('/deep/down/bytes', new Blob([bytes]), { force: true })
    const got = await volume.readFile('/deep/down/bytes', { format: 'bytes' })
    assert.equal(createHash('sha256').update(got).digest('hex'), createHash('sha256').update(bytes).digest('hex'))
    await volume.writeFile('/text', 'žluť', { uid: 1000, gid: 1000, mode: 0o640 })
    assert.equal(await volume.readFile('/text'), 'žluť')
    const stat = await volume.getInfo('/text')
    assert.deepEqual([stat.name, stat.type, stat.path, stat.size, stat.mode & 0o777, stat.uid, stat.gid], ['text', 'file', '/text', 6, 0o640, 1000, 1000])
    assert.ok(Math.abs(Date.now() - stat.mtime) < 300_000)
    await volume.writeFile('/empty', '')
    assert.equal(await volume.readFile('/empty'), '')
    const parts = []
    for await (const part of await volume.readFile('/text', { format: 'stream' })) parts.push(part)
    assert.equal(Buffer.concat(parts).toString(), 'žluť')
  })

  test('have directories, listed to a depth; metadata that changes; removal', async () => {
    await volume.makeDir('/dir/a/b', { force: true })
    await volume.writeFile('/dir/a/f', 'x')
    assert.deepEqual((await volume.list('/dir')).map((e) => [e.name, e.type]), [['a', 'directory']])
    assert.deepEqual((await volume.list('/dir', { depth: 3 })).map((e) => e.path).sort(), ['/dir/a', '/dir/a/b', '/dir/a/f'])
    const changed = await volume.updateMetadata('/dir/a/f', { mode: 0o600, uid: 7, gid: 8 })
    assert.deepEqual([changed.mode & 0o777, changed.uid, changed.gid], [0o600, 7, 8])
    await assert.rejects(volume.makeDir('/dir/a'), e2b.VolumeError)
    await volume.remove('/dir/a')
    assert.equal(await volume.exists('/dir/a'), false)
    await assert.rejects(volume.readFile('/dir/a/f'), e2b.VolumePathNotFoundError)
    await assert.rejects(volume.list('/none'), e2b.VolumePathNotFoundError)
    await assert.rejects(volume.remove('/none'), e2b.VolumePathNotFoundError)
  })

  test('open to their own token only, and no path escapes a volume', async () => {
    const content = (path, token) => fetch(`${server.url}/volumecontent/${volume.volumeId}/file?path=${encodeURIComponent(path)}`, { headers: token ? { Authorization: `Bearer ${token}` } : {} })
    assert.equal((await content('/text', volume.token)).status, 200)
    const other = await Volume.create('foreign')
    for (const token of [undefined, 'guess', other.token, server.key]) assert.ok([401, 403, 404].includes((await content('/text', token)).status), `${token}`)
    for (const path of ['../../../../etc/passwd', '/../../etc/passwd', '/a/../../../etc/passwd', '/text\0']) assert.ok([400, 403, 404].includes((await content(path, volume.token)).status), path)
    await Volume.destroy(other.volumeId)
  })
})
