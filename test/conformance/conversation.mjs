// Conversations of clients that no registry here has, such as the Python SDK: a proxy that
// records what one sends and is answered, and a player that sends the same to another
// server and compares the answers.
//
//   node conversation.mjs record URL FILE "name and version of the client"
//
// listens on a port that it prints, passes everything on to URL and writes FILE when it
// gets SIGTERM. Values that each server makes up, such as IDs and tokens, are replaced by
// variables: {{sandboxID1}}. A conversation has no headers but those that matter.
import assert from 'node:assert/strict'
import { writeFileSync } from 'node:fs'
import http from 'node:http'
import { setTimeout as sleep } from 'node:timers/promises'
import { pathToFileURL } from 'node:url'
import { gunzipSync } from 'node:zlib'

/** kept are the request headers that a server may read. */
const kept = ['authorization', 'connect-protocol-version', 'connect-timeout-ms', 'connect-content-encoding', 'connect-accept-encoding', 'content-encoding', 'content-type', 'accept', 'accept-encoding', 'e2b-sandbox-id', 'e2b-sandbox-port', 'keepalive-ping-interval', 'range', 'user-agent', 'x-access-token', 'e2b-traffic-access-token']

/** made are the fields whose values servers make up. */
const made = new Set(['sandboxID', 'envdAccessToken', 'trafficAccessToken', 'buildID', 'templateID', 'volumeID', 'secretID', 'snapshotID', 'token', 'watcherId', 'pid', 'id'])

/** uncertain are the fields whose values differ from run to run; only their type is compared. */
const uncertain = new Set(['cpuUsedPct', 'memUsed', 'memTotal', 'memCache', 'diskUsed', 'diskTotal', 'cpuCount', 'memoryMB', 'diskSizeMB', 'timestampUnix', 'timestamp', 'endAt', 'startedAt', 'createdAt', 'updatedAt', 'modifiedTime', 'lastSpawnedAt', 'spawnCount', 'domain', 'clientID', 'execution_count', 'traceback', 'size', 'png', 'logEntries', 'url', 'names'])

/** Variables are the values that the server of one conversation made up. */
class Variables {
  values = new Map() // by name
  names = new Map() // by value
  counts = {}
  /** learn finds values in an answer that are new. */
  learn(v, key = '') {
    if (Array.isArray(v)) return v.forEach((e) => this.learn(e, key))
    if (v && typeof v === 'object') return Object.entries(v).forEach(([k, e]) => this.learn(e, k))
    if (key === 'url' && /\/templatefiles\//.test(v)) return this.name('upload', new URL(v).pathname + new URL(v).search)
    if (!made.has(key) || (typeof v !== 'string' && typeof v !== 'number') || v === '' || this.names.has(String(v)) || String(v).length < (key === 'pid' ? 1 : 8)) return
    if (key === 'templateID' && !/^[a-z0-9]{20}$/.test(v)) return
    this.name(key, String(v))
  }
  name(key, value) {
    const name = `${key}${(this.counts[key] = (this.counts[key] ?? 0) + 1)}`
    this.values.set(name, value)
    this.names.set(value, name)
  }
  /** hide puts names for values. Process IDs are numbers, which are in many texts, and so only hidden in fields. */
  hide(text) {
    // The longest first: the URL of an upload has an ID in it.
    for (const [value, name] of [...this.names].sort(([a], [b]) => b.length - a.length)) {
      if (name.startsWith('pid')) text = text.replaceAll(new RegExp(`("pid": ?)${value}}`, 'g'), `$1"{{${name}}}"}`)
      else text = text.replaceAll(value, `{{${name}}}`).replaceAll(encodeURIComponent(value), `{{${name}}}`)
    }
    return text
  }
  /** show puts values for names, and waits for those that are not known yet. */
  async show(text) {
    for (const [whole, name] of [...text.matchAll(/{{(\w+)}}/g)]) {
      for (let i = 0; !this.values.has(name); i++) {
        if (i > 600) throw new Error(`no answer has had ${name}`)
        await sleep(50)
      }
      text = text.replaceAll(name.startsWith('pid') ? `"${whole}"` : whole, this.values.get(name)).replaceAll(whole, this.values.get(name))
    }
    return text
  }
}

/** envelopes are the messages of a stream of the Connect protocol. The rest is incomplete. */
function envelopes(bytes) {
  const out = []
  while (bytes.length >= 5 && bytes.length >= 5 + bytes.readUInt32BE(1)) {
    const n = 5 + bytes.readUInt32BE(1)
    out.push({ flags: bytes[0], body: bytes.subarray(5, n) })
    bytes = bytes.subarray(n)
  }
  return { out, rest: bytes }
}

const json = (text) => {
  try {
    return JSON.parse(text)
  } catch {
    return undefined
  }
}

/** messages are the parsed messages of a body, by its type; undefined if they are no JSON. */
function messages(type, body) {
  if (/^application\/connect\+json/.test(type)) return envelopes(body).out.map((e) => json(e.body.toString()) ?? {})
  const text = body.toString()
  if (/^application\/(x-)?ndjson|^application\/json/.test(type) && json(text) !== undefined) return [json(text)]
  const lines = text.trim().split('\n').map(json)
  return lines.every((l) => l && typeof l === 'object') ? lines : undefined
}

/** shape is a message without what differs from run to run. */
function shape(v, key = '') {
  if (uncertain.has(key)) return 'uncertain'
  if (Array.isArray(v)) return v.map((e) => shape(e, key))
  if (v === null || v === undefined) return null
  if (typeof v === 'object') return Object.fromEntries(Object.entries(v).filter(([k]) => !['keepalive'].includes(k)).map(([k, e]) => [k, shape(e, k)]).sort(([a], [b]) => (a < b ? -1 : 1)))
  if (key === 'pid') return 'uncertain'
  return v
}

/** answer is what is compared of an answer: messages, with neighbouring pieces of output put together. */
export function answer(status, type, body, variables) {
  const parsed = messages(type, body)
  const out = { status, type: type.split(';')[0] }
  if (!parsed) return { ...out, body: variables.hide(body.toString('latin1')) }
  out.messages = []
  for (const m of parsed.map((m) => shape(json(variables.hide(JSON.stringify(m)))))) {
    const data = m.event?.data
    const last = out.messages.at(-1)
    if (m.event && Object.keys(m.event).length === 0) continue // it was only a keepalive
    if (m.type === 'keepalive') continue
    if (data) {
      const at = last?.data ? last : { data: {} }
      for (const [k, v] of Object.entries(data)) at.data[k] = (at.data[k] ?? '') + Buffer.from(v, 'base64').toString()
      if (at !== last) out.messages.push(at)
    } else if ((m.type === 'stdout' || m.type === 'stderr') && last?.type === m.type) last.text += m.text
    else out.messages.push(m)
  }
  // The echo of what was typed and the prompt come in any order.
  for (const { data } of out.messages) if (data?.pty) data.pty = data.pty.split(/\r?\n/).filter((l) => l && !/[\x1b$;]/.test(l))
  return out
}

/** within is v without the fields that want lacks: a server may answer more than it did. */
function within(v, want) {
  if (Array.isArray(v) && Array.isArray(want)) return v.map((e, i) => within(e, want[i]))
  if (v && want && typeof v === 'object' && typeof want === 'object') return Object.fromEntries(Object.entries(v).filter(([k]) => k in want).map(([k, e]) => [k, within(e, want[k])]))
  return v
}

/** polled says whether a step only asks how far a build is. */
const polled = (s) => /\/builds\/[^/]*\/status/.test(s.path)

/** onePoll keeps the last of the steps that ask for the state of one build one after another. */
function onePoll(steps) {
  const out = []
  for (const s of steps) {
    if (polled(s)) s.path = s.path.split('?')[0]
    const last = out.at(-1)
    if (last && polled(s) && last.path === s.path) out[out.length - 1] = { ...s, begin: last.begin }
    else out.push(s)
  }
  return out
}

/** record listens as a proxy of url until stop is called, which returns the conversation. */
export async function record(url, client) {
  const variables = new Variables()
  const steps = []
  let clock = 0
  let last = Date.now()
  const server = http.createServer(async (q, a) => {
    const step = { begin: clock++, pause: Date.now() - last }
    steps.push(step)
    const parts = []
    for await (const b of q) parts.push(b)
    const body = Buffer.concat(parts)
    const headers = { ...q.headers }
    delete headers['transfer-encoding']
    const to = new URL(url + q.url)
    const out = http.request(to, { method: q.method, headers: { ...headers, 'content-length': body.length } }, async (r) => {
      a.writeHead(r.statusCode, r.headers)
      const type = r.headers['content-type'] ?? ''
      let all = Buffer.alloc(0)
      try {
        for await (const b of r) {
          all = Buffer.concat([all, b])
          if (/connect\+json/.test(type)) variables.learn(messages(type, all))
          a.write(b)
        }
      } catch {
        return a.destroy() // one of both ends has left
      }
      if (r.headers['content-encoding'] === 'gzip') all = gunzipSync(all)
      variables.learn(messages(type, all))
      last = Date.now()
      Object.assign(step, { end: clock++, q: { method: q.method, path: q.url, headers, body }, a: { status: r.statusCode, type, body: all } })
      a.end()
    })
    a.on('close', () => {
      if (step.end === undefined) {
        out.destroy()
        Object.assign(step, { end: clock++, left: true, q: { method: q.method, path: q.url, headers, body }, a: { status: 0, type: '', body: Buffer.alloc(0) } })
      }
    })
    out.on('error', () => a.destroy())
    out.end(body)
  })
  await new Promise((done) => server.listen(0, '127.0.0.1', done))
  const own = `127.0.0.1:${server.address().port}`
  const text = (s) => variables.hide(s.replaceAll(own, '{{host}}').replaceAll(new URL(url).host, '{{host}}'))
  return {
    url: `http://${own}`,
    stop() {
      server.closeAllConnections()
      server.close()
      return {
        client,
        steps: onePoll(steps
          .filter((s) => s.q)
          .map(({ begin, end, pause, left, q, a }) => {
            const plain = q.body.length === 0 || ((q.headers['content-encoding'] ?? 'identity') === 'identity' && Buffer.from(q.body.toString()).equals(q.body) && !/connect\+/.test(q.headers['content-type'] ?? ''))
            const stream = /connect\+json/.test(q.headers['content-type'] ?? '') && envelopes(q.body).out.map((e) => text(e.body.toString()))
            return {
              begin, end, ...(pause > 200 && { pause }), ...(left && { left }), method: q.method, path: text(q.path),
              headers: Object.fromEntries(kept.filter((k) => q.headers[k]).map((k) => [k, text(String(q.headers[k]))])),
              ...(q.body.length === 0 ? {} : stream ? { stream } : plain ? { body: text(q.body.toString()) } : { base64: q.body.toString('base64') }),
              answer: left ? undefined : answer(a.status, a.type, a.body, variables),
            }
          })),
      }
    },
  }
}

/** play sends a conversation to a server and compares its answers. */
export async function play(conversation, { url, key }) {
  const variables = new Variables()
  variables.values.set('host', new URL(url).host)
  const ended = new Map()
  const finish = new Map(conversation.steps.map((s) => [s, new Promise((done) => ended.set(s, done))]))
  const agent = new http.Agent({ keepAlive: true, maxSockets: 100 })
  const problems = []
  const send = async (s) => {
    const headers = {}
    for (const [k, v] of Object.entries(s.headers)) headers[k] = await variables.show(v)
    if (!s.path.startsWith('{{upload')) headers['x-api-key'] = key
    let body = Buffer.from(s.base64 ?? '', 'base64')
    if (s.body !== undefined) body = Buffer.from(await variables.show(s.body))
    if (s.stream) {
      const parts = []
      for (const m of s.stream) {
        const b = Buffer.from(await variables.show(m))
        const head = Buffer.alloc(5)
        head.writeUInt32BE(b.length, 1)
        parts.push(head, b)
      }
      body = Buffer.concat(parts)
    }
    const path = await variables.show(s.path)
    headers['content-length'] = body.length
    const once = () => new Promise((done, failed) => {
      const q = http.request(url + path, { method: s.method, headers, agent }, async (r) => {
        const type = r.headers['content-type'] ?? ''
        let all = Buffer.alloc(0)
        try {
          for await (const b of r) {
            all = Buffer.concat([all, b])
            if (/connect\+json/.test(type)) variables.learn(messages(type, all))
          }
          if (r.headers['content-encoding'] === 'gzip') all = gunzipSync(all)
          variables.learn(messages(type, all))
          done(answer(r.statusCode, type, all, variables))
        } catch (err) {
          s.left ? done(undefined) : failed(err)
        }
      })
      q.on('error', (err) => (s.left ? done(undefined) : failed(err)))
      q.end(body)
      if (s.left) {
        // The client left; it had seen all that ended before.
        Promise.all(conversation.steps.filter((o) => o.end < s.end && o !== s).map((o) => finish.get(o))).then(() => q.destroy())
      }
    })
    let got = await once()
    const wanted = s.answer?.messages?.[0]?.status
    while (polled(s) && wanted !== 'building' && ['building', 'waiting'].includes(got.messages?.[0]?.status)) {
      await sleep(200)
      got = await once()
    }
    if (!s.left) assert.deepEqual(within(got, s.answer), s.answer, `${s.method} ${s.path}`)
  }
  for (const s of [...conversation.steps].sort((a, b) => a.begin - b.begin)) {
    await Promise.all(conversation.steps.filter((o) => o.end < s.begin).map((o) => finish.get(o)))
    if (s.pause) await sleep(Math.min(s.pause, 1000))
    send(s).catch((err) => problems.push(err)).finally(() => ended.get(s)())
    await sleep(5)
  }
  await Promise.all(finish.values())
  agent.destroy()
  if (problems.length) throw problems[0]
}

if (import.meta.url === pathToFileURL(process.argv[1] ?? '').href && process.argv[2] === 'record') {
  const [url, file, client] = process.argv.slice(3)
  const r = await record(url, client)
  console.log(r.url)
  process.on('SIGTERM', () => {
    writeFileSync(file, JSON.stringify(r.stop(), null, 1) + '\n')
    process.exit(0)
  })
}
