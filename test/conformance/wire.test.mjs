// The wire protocol, for clients other than the JavaScript SDK: Connect with JSON and
// binary messages over HTTP/1.1 and HTTP/2 without TLS, the requests of the Python
// SDKs, and malformed requests.
import assert from 'node:assert/strict'
import { createHash } from 'node:crypto'
import http from 'node:http'
import http2 from 'node:http2'
import { after, before, describe, test } from 'node:test'
import { eventually, start } from './server.mjs'

let server, box
before(async () => {
  server = await start()
  // As the Python SDK 2.45 and the CLI create: the old path, secure by request.
  const r = await server.api('POST', '/sandboxes', { templateID: 'base', timeout: 600, secure: true, metadata: { from: 'wire' } })
  assert.equal(r.status, 201, r.text)
  box = r.json
})
after(async () => {
  if (box) assert.equal((await server.api('DELETE', `/sandboxes/${box.sandboxID}`)).status, 204)
  await server?.stop()
})

const headers = (more = {}) => ({
  'e2b-sandbox-id': box.sandboxID,
  'e2b-sandbox-port': '49983',
  'x-access-token': box.envdAccessToken,
  'connect-protocol-version': '1',
  ...more,
})

/** over makes one POST by HTTP/1.1 or by h2c with prior knowledge. By HTTP/1.1 it tells seen what comes, as it comes. */
function over(version, path, body, more, seen = () => {}) {
  const url = new URL(server.url + path)
  if (version === 1)
    return new Promise((done, failed) => {
      const r = http.request(url, { method: 'POST', headers: headers(more) }, (res) => {
        const parts = []
        res.on('data', (b) => (parts.push(b), seen(Buffer.concat(parts).toString())))
        res.on('error', failed)
        res.on('end', () => done({ status: res.statusCode, headers: res.headers, body: Buffer.concat(parts) }))
      })
      r.on('error', failed)
      r.end(body)
    })
  return new Promise((done, failed) => {
    const session = http2.connect(url.origin)
    session.on('error', failed)
    const r = session.request({ ':method': 'POST', ':path': url.pathname + url.search, ...headers(more) })
    let head
    const parts = []
    r.on('response', (h) => (head = h))
    r.on('data', (b) => parts.push(b))
    r.on('error', failed)
    r.on('end', () => {
      session.close()
      done({ status: head[':status'], headers: head, body: Buffer.concat(parts) })
    })
    r.end(body)
  })
}

const envelope = (b, flags = 0) => {
  const head = Buffer.alloc(5)
  head[0] = flags
  head.writeUInt32BE(b.length, 1)
  return Buffer.concat([head, Buffer.from(b)])
}
function envelopes(b) {
  const all = []
  while (b.length >= 5) {
    const n = b.readUInt32BE(1)
    all.push({ flags: b[0], data: b.subarray(5, 5 + n) })
    b = b.subarray(5 + n)
  }
  assert.equal(b.length, 0, 'the stream ends within a message')
  return all
}

// The little of protobuf's encoding that these tests need: varints and
// length-delimited fields.
const varint = (n) => (n < 128 ? [n] : [(n & 127) | 128, ...varint(n >>> 7)])
const field = (n, value) => {
  const b = Buffer.from(value)
  return Buffer.concat([Buffer.from([...varint((n << 3) | 2), ...varint(b.length)]), b])
}
function fields(b) {
  const all = []
  let at = 0
  const read = () => {
    let n = 0
    for (let shift = 0; ; shift += 7) {
      n |= (b[at] & 127) << shift
      if (b[at++] < 128) return n
    }
  }
  while (at < b.length) {
    const tag = read()
    if ((tag & 7) === 0) all.push([tag >> 3, read()])
    else if ((tag & 7) === 2) {
      const n = read()
      all.push([tag >> 3, b.subarray(at, (at += n))])
    } else throw new Error(`wire type ${tag & 7}`)
  }
  return all
}
const pick = (b, ...path) => path.reduce((at, n) => at && fields(at).find((f) => f[0] === n)?.[1], b)

for (const version of [1, 2])
  describe(`Connect over HTTP/${version === 1 ? '1.1' : '2 without TLS'}`, () => {
    test('unary JSON', async () => {
      const r = await over(version, '/filesystem.Filesystem/Stat', '{"path":"/etc/hostname"}', { 'content-type': 'application/json' })
      assert.equal(r.status, 200, `${r.body}`)
      const { entry } = JSON.parse(r.body)
      assert.deepEqual([entry.name, entry.type, entry.path], ['hostname', 'FILE_TYPE_FILE', '/etc/hostname'])
      assert.equal(typeof entry.size, 'string', 'int64 is a string in JSON')
    })

    test('unary binary', async () => {
      const r = await over(version, '/filesystem.Filesystem/Stat', field(1, '/etc/hostname'), { 'content-type': 'application/proto' })
      assert.equal(r.status, 200, `${r.body}`)
      assert.equal(`${pick(r.body, 1, 1)}`, 'hostname')
      assert.equal(`${pick(r.body, 1, 3)}`, '/etc/hostname')
    })

    test('a stream of JSON', async () => {
      const start = { process: { cmd: '/bin/sh', args: ['-c', 'echo out; echo err >&2; exit 3'] } }
      const r = await over(version, '/process.Process/Start', envelope(JSON.stringify(start)), { 'content-type': 'application/connect+json' })
      assert.equal(r.headers['content-type'], 'application/connect+json')
      const all = envelopes(r.body)
      const events = all.slice(0, -1).map((e) => JSON.parse(e.data).event)
      assert.ok(events[0].start.pid > 0)
      const text = (k) => Buffer.concat(events.map((e) => Buffer.from(e.data?.[k] ?? '', 'base64'))).toString()
      assert.deepEqual([text('stdout'), text('stderr')], ['out\n', 'err\n'])
      assert.equal(events.at(-1).end.exitCode, 3)
      assert.equal(all.at(-1).flags, 2)
      assert.equal(JSON.parse(all.at(-1).data).error, undefined)
    })

    test('a stream of binary messages', async () => {
      const start = field(1, Buffer.concat([field(1, '/bin/sh'), field(2, '-c'), field(2, 'printf out')]))
      const r = await over(version, '/process.Process/Start', envelope(start), { 'content-type': 'application/connect+proto' })
      const all = envelopes(r.body)
      const out = all.slice(0, -1).map((e) => pick(e.data, 1, 2, 1) ?? Buffer.alloc(0))
      assert.equal(Buffer.concat(out).toString(), 'out')
      assert.ok(pick(all[0].data, 1, 1, 1) > 0, 'the pid comes first')
      assert.equal(all.at(-1).flags, 2)
    })

    test('a stream from the client: stdin', async () => {
      const tag = `cat-${version}`
      const started = over(version, '/process.Process/Start', envelope(JSON.stringify({ process: { cmd: '/bin/cat' }, tag, stdin: true })), { 'content-type': 'application/connect+json' })
      await eventually('the process', async () => {
        const r = await over(version, '/process.Process/List', '{}', { 'content-type': 'application/json' })
        return JSON.parse(r.body).processes?.some((p) => p.tag === tag)
      })
      const messages = [{ start: { process: { tag } } }, { data: { input: { stdin: btoa('one ') } } }, { keepalive: {} }, { data: { input: { stdin: btoa('two') } } }]
      const sent = await over(version, '/process.Process/StreamInput', Buffer.concat(messages.map((m) => envelope(JSON.stringify(m)))), { 'content-type': 'application/connect+json' })
      assert.equal(JSON.parse(envelopes(sent.body).at(-1).data).error, undefined)
      await over(version, '/process.Process/CloseStdin', JSON.stringify({ process: { tag } }), { 'content-type': 'application/json' })
      const events = envelopes((await started).body).slice(0, -1).map((e) => JSON.parse(e.data).event)
      assert.equal(Buffer.concat(events.map((e) => Buffer.from(e.data?.stdout ?? '', 'base64'))).toString(), 'one two')
    })

    test('errors have their Connect code', async () => {
      for (const [path, body, status, code] of [
        ['/filesystem.Filesystem/Stat', '{"path":"/no/such"}', 404, 'not_found'],
        ['/filesystem.Filesystem/ListDir', '{"path":"/etc/hostname"}', 400, 'invalid_argument'],
        ['/filesystem.Filesystem/MakeDir', '{"path":"/etc"}', 409, 'already_exists'],
        ['/process.Process/SendSignal', '{"process":{"pid":999999},"signal":"SIGNAL_SIGKILL"}', 404, 'not_found'],
      ]) {
        const r = await over(version, path, body, { 'content-type': 'application/json' })
        assert.deepEqual([r.status, JSON.parse(r.body).code], [status, code], `${path}: ${r.body}`)
      }
      const r = await over(version, '/process.Process/Start', envelope('{"process":{"cmd":"/no/such"}}'), { 'content-type': 'application/connect+json' })
      assert.ok(JSON.parse(envelopes(r.body).at(-1).data).error.code)
    })
  })

describe('requests of the Python SDKs', () => {
  test('the old paths: list with metadata, get, timeout, connect', async () => {
    // urllib's encoding: once less than the JavaScript SDK's.
    const list = await server.api('GET', '/v2/sandboxes?metadata=from%3Dwire&state=running&limit=5')
    assert.deepEqual(list.json.map((s) => s.sandboxID), [box.sandboxID])
    assert.equal((await server.api('GET', `/sandboxes/${box.sandboxID}`)).json.state, 'running')
    assert.equal((await server.api('POST', `/sandboxes/${box.sandboxID}/timeout`, { timeout: 900 })).status, 204)
    const connected = await server.api('POST', `/sandboxes/${box.sandboxID}/connect`, { timeout: 60 })
    assert.equal(connected.status, 200)
    assert.equal(connected.json.envdAccessToken, box.envdAccessToken)
    assert.ok(Date.parse((await server.api('GET', `/sandboxes/${box.sandboxID}`)).json.endAt) > Date.now() + 600_000, 'connect only extends')
  })

  test('the synchronous SDK polls watchers', async () => {
    const rpc = async (method, body) => {
      const r = await over(1, `/filesystem.Filesystem/${method}`, JSON.stringify(body), { 'content-type': 'application/json', authorization: `Basic ${btoa('user:')}` })
      return { status: r.status, ...JSON.parse(r.body) }
    }
    await rpc('MakeDir', { path: '/home/user/polled' })
    const { watcherId } = await rpc('CreateWatcher', { path: '/home/user/polled' })
    assert.ok(watcherId)
    await over(1, '/files?path=/home/user/polled/f&username=user', 'x', { 'content-type': 'application/octet-stream' })
    const events = []
    await eventually('the event', async () => {
      events.push(...((await rpc('GetWatcherEvents', { watcherId })).events ?? []))
      return events.some((e) => e.name === 'f' && e.type === 'EVENT_TYPE_CREATE')
    })
    assert.equal((await rpc('RemoveWatcher', { watcherId })).status, 200)
    assert.equal((await rpc('GetWatcherEvents', { watcherId })).code, 'not_found')
  })

  test('stdin is open when the field is absent, and a process outlives its client', async () => {
    const r = http.request(server.url + '/process.Process/Start', { method: 'POST', headers: headers({ 'content-type': 'application/connect+json' }) })
    r.on('error', () => {})
    r.end(envelope(JSON.stringify({ process: { cmd: '/bin/cat' }, tag: 'orphan' })))
    const pid = await eventually('the process', async () => {
      const l = await over(1, '/process.Process/List', '{}', { 'content-type': 'application/json' })
      return JSON.parse(l.body).processes?.find((p) => p.tag === 'orphan')?.pid
    })
    r.destroy()
    let seen = ''
    const connected = over(1, '/process.Process/Connect', envelope(JSON.stringify({ process: { pid } })), { 'content-type': 'application/connect+json' }, (text) => (seen = text))
    await eventually('the connection', () => seen.includes('"start"'))
    await eventually('input', async () => (await over(1, '/process.Process/SendInput', JSON.stringify({ process: { pid }, input: { stdin: btoa('late') } }), { 'content-type': 'application/json' })).status === 200)
    await over(1, '/process.Process/CloseStdin', JSON.stringify({ process: { pid } }), { 'content-type': 'application/json' })
    const events = envelopes((await connected).body).slice(0, -1).map((e) => JSON.parse(e.data).event)
    assert.equal(events[0].start.pid, pid)
    assert.equal(events.at(-1).end.exited, true)
  })

  test('deadlines by Connect-Timeout-Ms end the process, keep-alives come when asked for', async () => {
    const start = envelope(JSON.stringify({ process: { cmd: '/bin/sleep', args: ['300'] }, tag: 'deadline' }))
    const alive = http.request(server.url + '/process.Process/Start', { method: 'POST', headers: headers({ 'content-type': 'application/connect+json', 'keepalive-ping-interval': '1' }) }, (res) =>
      res.on('data', (b) => (text += b)).on('error', () => {}),
    )
    let text = ''
    alive.on('error', () => {})
    alive.end(envelope(JSON.stringify({ process: { cmd: '/bin/sleep', args: ['300'] }, tag: 'kept' })))
    await eventually('a keep-alive', () => text.includes('"keepalive"'))
    alive.destroy()
    const r = await over(1, '/process.Process/Start', start, { 'content-type': 'application/connect+json', 'connect-timeout-ms': '1000' })
    const all = envelopes(r.body)
    assert.equal(JSON.parse(all.at(-1).data).error?.code, 'deadline_exceeded')
    await eventually('the end of the process', async () => {
      const l = await over(1, '/process.Process/List', '{}', { 'content-type': 'application/json' })
      return !JSON.parse(l.body).processes?.some((p) => p.tag === 'deadline')
    })
  })
})

describe('routes of the guest', () => {
  const get = (path, more = {}) => fetch(server.url + path, { headers: headers(more) })

  test('health, metrics, environment', async () => {
    assert.equal((await get('/health')).status, 204)
    const m = await (await get('/metrics')).json()
    for (const k of ['ts', 'cpu_count', 'cpu_used_pct', 'mem_total', 'mem_used', 'disk_used', 'disk_total']) assert.equal(typeof m[k], 'number', k)
    const envs = await (await get('/envs')).json()
    assert.equal(envs.E2B_SANDBOX_ID, box.sandboxID)
  })

  test('files: ranges, types, gzip, empty, multipart with several', async () => {
    const form = new FormData()
    for (const n of [1, 2, 3]) form.append('file', new Blob([`content ${n}`]), `/home/user/multi/${n}.txt`)
    const up = await fetch(server.url + '/files?username=user', { method: 'POST', headers: headers(), body: form })
    assert.deepEqual((await up.json()).map((f) => f.path), [1, 2, 3].map((n) => `/home/user/multi/${n}.txt`))
    const part = await get('/files?path=multi/2.txt&username=user', { range: 'bytes=0-6' })
    assert.deepEqual([part.status, await part.text()], [206, 'content'])
    const plain = await get('/files?path=multi/1.txt&username=user')
    assert.match(plain.headers.get('content-type'), /^text\/plain/)
    await fetch(server.url + '/files?path=void&username=user', { method: 'POST', headers: headers({ 'content-type': 'application/octet-stream' }), body: '' })
    const empty = await get('/files?path=void&username=user')
    assert.deepEqual([empty.status, empty.headers.get('content-length')], [200, '0'])
    for (const [path, status] of [['/files?path=/no/such', 404], ['/files?path=/etc', 400], ['/files?path=/etc/hostname&username=nobody-here', 401]])
      assert.equal((await get(path)).status, status, path)
  })

  test('routes of the control plane are not reachable from outside', async () => {
    for (const path of ['/init', '/freeze', '/unfreeze', '/collapse', '/fsfreeze', '/fsthaw', '/upgrade']) {
      const r = await fetch(server.url + path, { method: 'POST', headers: headers(), body: '{}' })
      assert.equal(r.status, 404, path)
    }
  })

  test('nothing answers without the access token', async () => {
    for (const [path, method] of [['/files?path=/etc/hostname', 'GET'], ['/metrics', 'GET'], ['/envs', 'GET'], ['/process.Process/List', 'POST'], ['/filesystem.Filesystem/Stat', 'POST']]) {
      const r = await fetch(server.url + path, { method, headers: headers({ 'x-access-token': 'guess', 'content-type': 'application/json' }), body: method === 'POST' ? '{}' : undefined })
      assert.equal(r.status, 401, path)
    }
  })

  test('a signature computed as in the SDKs is accepted', async () => {
    const exp = Math.floor(Date.now() / 1000) + 60
    const sign = (op, path) => 'v1_' + createHash('sha256').update(`${path}:${op}:user:${box.envdAccessToken}:${exp}`).digest('base64').replace(/=+$/, '')
    const url = (op, path) => `${server.url}/files?path=${path}&username=user&signature=${encodeURIComponent(sign(op, path))}&signature_expiration=${exp}`
    const put = await fetch(url('write', 'by-hand'), { method: 'POST', headers: { 'content-type': 'application/octet-stream' }, body: 'signed' })
    assert.equal(put.status, 200)
    assert.equal(await (await fetch(url('read', 'by-hand'))).text(), 'signed')
  })
})

describe('addresses', () => {
  const at = (id, port, more = {}) => fetch(server.url + '/', { headers: { 'e2b-sandbox-id': id, 'e2b-sandbox-port': String(port), ...more } })

  test('an unknown sandbox is 502, as JSON and, for a browser, as a page', async () => {
    const id = 'i' + 'z'.repeat(20)
    const r = await at(id, 8000)
    assert.equal(r.status, 502)
    const body = await r.json()
    assert.deepEqual([body.sandboxId, body.message, body.code], [id, 'The sandbox was not found', 502])
    // Not by fetch, which says of itself that it does not navigate.
    const page = await new Promise((done, failed) => {
      const browser = { 'user-agent': 'Mozilla/5.0 (X11; Linux x86_64) Firefox/140.0', accept: 'text/html,application/xhtml+xml', 'sec-fetch-mode': 'navigate', 'e2b-sandbox-id': id, 'e2b-sandbox-port': '8000' }
      http.get(server.url, { headers: browser }, (res) => (res.resume(), done(res))).on('error', failed)
    })
    assert.equal(page.statusCode, 502)
    assert.match(page.headers['content-type'], /^text\/html/)
  })

  test('a closed port is 502 and says which', async () => {
    const r = await at(box.sandboxID, 8123, box.trafficAccessToken ? { 'e2b-traffic-access-token': box.trafficAccessToken } : {})
    const body = await r.json()
    assert.deepEqual([r.status, body.message, body.port, body.code], [502, 'The sandbox is running but port is not open', 8123, 502])
  })

  test('a malformed sandbox ID or port is refused', async () => {
    for (const [id, port] of [['../etc', 80], ['UPPER', 80], [box.sandboxID, 0], [box.sandboxID, 70000], [box.sandboxID, 'x']]) {
      const r = await at(id, port)
      assert.ok([400, 502].includes(r.status), `${id}:${port}: ${r.status}`)
    }
  })
})
