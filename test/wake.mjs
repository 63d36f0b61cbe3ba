// Measures pause, resume, fork and a start from the template's snapshot of one or
// more programs in turns, so that they share the machine's load.
//
//   node test/wake.mjs RUNS POSTERN [POSTERN ...]
//
// Standing still is measured inside: a process writes the time every millisecond and
// reports its longest gap.
import { spawn } from 'node:child_process'
import { mkdtempSync, openSync, readFileSync, rmSync } from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { join, resolve } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'

const require = createRequire(new URL('../demo/package.json', import.meta.url))
const { Sandbox } = require('@e2b/code-interpreter')
const runs = Number(process.argv[2] ?? 15)
const programs = process.argv.slice(3).map((p) => resolve(p))
const figures = new Map()
const add = (name, n, ms) => {
  if (!figures.has(name)) figures.set(name, programs.map(() => []))
  figures.get(name)[n].push(ms)
}
const time = async (f) => {
  const t = performance.now()
  await f()
  return performance.now() - t
}
const at = (xs, p) => xs.toSorted((a, b) => a - b)[Math.min(xs.length - 1, Math.floor(xs.length * p))]

async function up(program, n) {
  const dir = mkdtempSync(join(tmpdir(), 'postern-wake-'))
  const log = join(dir, 'log')
  const out = openSync(log, 'w')
  const port = Number(process.env.WAKE_PORT ?? 3500) + 10 * n
  const server = spawn(program, ['up', '--data', dir, '--listen', `127.0.0.1:${port}`, '--smtp', `127.0.0.1:${port + 1}`, '--snapshots', '--pool-max', '0', '--pool-min', '0'], { stdio: ['ignore', out, out] })
  const ended = new Promise((r) => server.on('exit', r))
  process.on('exit', () => server.kill('SIGTERM')) // it freezes what runs, so nothing is left
  for (let i = 0; !readFileSync(log, 'utf8').includes('made snapshot of template'); i++) {
    if (i > 1200) throw new Error(readFileSync(log, 'utf8'))
    await sleep(100)
  }
  const url = `http://127.0.0.1:${port}`
  const options = { apiUrl: url, sandboxUrl: url, apiKey: readFileSync(join(dir, 'project.key'), 'utf8').trim() }
  return {
    n, options, log,
    post: async (path, body) => {
      const r = await fetch(url + path, { method: 'POST', headers: { 'X-API-Key': options.apiKey, 'Content-Type': 'application/json' }, body: JSON.stringify(body) })
      if (r.status >= 300) throw new Error(`${path}: ${r.status} ${await r.text()}`)
      return r.status === 204 ? null : r.json()
    },
    down: async () => {
      server.kill('SIGTERM')
      await ended
      if (process.env.WAKE_LOG) console.log(readFileSync(log, 'utf8').split('\n').filter((l) => l.includes(process.env.WAKE_LOG)).join('\n'))
      rmSync(dir, { recursive: true, force: true })
    },
  }
}

const gaps = `import time,threading
gap=0
def watch():
    global gap
    last=time.time()
    while True:
        time.sleep(0.001)
        now=time.time(); gap=max(gap,now-last); last=now
threading.Thread(target=watch,daemon=True).start()`

// Without this a signal ends only this program.
for (const s of ['SIGINT', 'SIGTERM']) process.on(s, () => process.exit(1))
const servers = []
for (const [n, p] of programs.entries()) servers.push(await up(p, n))
const big = []
const small = []
for (const s of servers) {
  const b = await Sandbox.create(s.options)
  await b.runCode('import os; dirty=bytearray(os.urandom(256<<20))')
  big.push(b)
  const f = await Sandbox.create(s.options)
  await f.runCode(gaps)
  small.push(f)
}
const parts = (process.env.WAKE_PARTS ?? 'start,pause,fork').split(',')
for (let i = 0; i < runs; i++) {
  for (const s of servers) {
    if (parts.includes('start')) {
      let b
      add('create from snapshot, answered', s.n, await time(async () => { b = await Sandbox.create(s.options) }))
      add('  its first echo', s.n, await time(() => b.commands.run('echo')))
      add('  kill', s.n, await time(() => b.kill()))
    }
    if (parts.includes('pause')) {
      await big[s.n].runCode('dirty[0] ^= 1')
      add('pause, 256 MiB', s.n, await time(() => big[s.n].pause()))
      if (process.env.WAKE_REST) await sleep(Number(process.env.WAKE_REST))
      add('resume, 256 MiB', s.n, await time(() => big[s.n].connect()))
      add('  its first runCode', s.n, await time(() => big[s.n].runCode('1')))
    }
    if (parts.includes('fork')) {
      await small[s.n].runCode('gap=0')
      let all
      add('fork of five, answered', s.n, await time(async () => { all = await s.post(`/sandboxes/${small[s.n].sandboxId}/fork`, { count: 5 }) }))
      const r = await small[s.n].runCode('gap')
      add('  the parent stood still', s.n, Number(r.text) * 1000)
      const ids = all.map((x) => x.sandbox?.sandboxID ?? x.sandboxID)
      if (i === 0 && ids.some((x) => !x)) throw new Error(JSON.stringify(all).slice(0, 500))
      add('  an echo in each', s.n, await time(() => Promise.all(ids.map(async (id) => (await Sandbox.connect(id, s.options)).commands.run('echo')))))
      await Promise.all(ids.map((id) => Sandbox.kill(id, s.options)))
    }
  }
}
for (const [name, all] of figures) {
  console.log(name.padEnd(36) + all.map((xs) => `p50 ${at(xs, 0.5).toFixed(1).padStart(7)} min ${at(xs, 0).toFixed(1).padStart(7)}`).join('   |   ') + ` ms (n=${runs})`)
}
for (const s of servers) await s.down()
process.exit(0)
