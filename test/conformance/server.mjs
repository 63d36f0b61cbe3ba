// Starts the real binary for a test file, with its own data directory, on free loopback
// ports. When the file ends, the server gets SIGTERM and the directory is removed.
import { execFile, spawn } from 'node:child_process'
import { mkdtempSync, readFileSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { dirname, join, resolve } from 'node:path'
import { fileURLToPath } from 'node:url'
import { setTimeout as sleep } from 'node:timers/promises'

const here = dirname(fileURLToPath(import.meta.url))
const binary = resolve(process.env.POSTERN_TEST_BINARY ?? join(here, '../../bin/postern'))

/**
 * start runs "postern up" and returns once it serves. The SDKs find it through
 * the environment, as a user of theirs would tell them.
 */
export async function start(...flags) {
  const data = mkdtempSync(join(tmpdir(), 'postern-conformance-'))
  const child = spawn(binary, ['up', '--data', data, '--listen', '127.0.0.1:0', '--smtp', '127.0.0.1:0', ...flags])
  let log = ''
  child.stdout.on('data', (b) => (log += b))
  child.stderr.on('data', (b) => (log += b))
  const ended = new Promise((done) => child.on('exit', done))
  for (let i = 0; !log.includes('/setup.link'); i++) {
    if (i > 3600 || child.exitCode !== null) throw new Error(`postern up: ${log}`)
    await sleep(50)
  }
  const url = log.match(/API, proxy, MCP +(http:\/\/\S+)/)[1]
  const key = readFileSync(join(data, 'project.key'), 'utf8').trim()
  Object.assign(process.env, { E2B_API_KEY: key, E2B_API_URL: url, E2B_SANDBOX_URL: url, E2B_VOLUME_API_URL: url })
  delete process.env.E2B_DOMAIN
  delete process.env.E2B_DEBUG
  return {
    url,
    key,
    data,
    log: () => log,
    /** memory returns how many bytes the server's process holds that are of no file. */
    memory: () => Number(readFileSync(`/proc/${child.pid}/status`, 'utf8').match(/RssAnon:\s+(\d+) kB/)[1]) * 1024,
    /** postern runs a subcommand of Postern's own and returns what it printed. */
    postern: (...args) =>
      new Promise((done, failed) => {
        execFile(binary, [...args, '--data', data], (err, out, errors) => (err ? failed(new Error(out + errors)) : done(out)))
      }),
    /** api makes one request to the control plane and returns status, headers and body. */
    async api(method, path, body, headers = {}) {
      const r = await fetch(url + path, {
        method,
        headers: { 'X-API-KEY': key, 'Content-Type': 'application/json', ...headers },
        body: body === undefined ? undefined : typeof body === 'string' ? body : JSON.stringify(body),
      })
      const text = await r.text()
      let json
      try {
        json = JSON.parse(text)
      } catch {
        // Not every answer is JSON.
      }
      return { status: r.status, headers: r.headers, text, json }
    },
    async stop() {
      // The server's log explains errors that a client sees only as "internal error".
      for (const line of log.split('\n')) if (line.includes('level=ERROR')) console.log(line)
      child.kill('SIGTERM')
      const status = await Promise.race([ended, sleep(180_000, 'did not end', { ref: false })])
      rmSync(data, { recursive: true, force: true })
      if (status !== 0) throw new Error(`postern up ended with ${status}: ${log.slice(-4000)}`)
    },
  }
}

/** eventually waits until f returns something true, for at most seconds. */
export async function eventually(what, f, seconds = 120) {
  const end = Date.now() + seconds * 1000
  for (;;) {
    const got = await f()
    if (got) return got
    if (Date.now() > end) throw new Error(`${what}: not within ${seconds} s`)
    await sleep(100)
  }
}

/** on makes an array to which listeners append, and its text. */
export function collector() {
  const parts = []
  const add = (s) => void parts.push(typeof s === 'string' ? s : Buffer.from(s).toString('utf8'))
  return { add, parts, text: () => parts.join('') }
}
