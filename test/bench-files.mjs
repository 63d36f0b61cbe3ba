// Measures file transfers through the official SDK, beside node alone against a plain
// file server in the same run, which is the floor. Several programs are compared pair by
// pair: each round does everything once with each.
//
//   node test/bench-files.mjs POSTERN… [RUNS]
//
// CPU is of node, of the server's process and of the cgroup of its sandboxes, in ms per
// transfer. ONLY=NAME;NAME in the environment selects what is measured. The last lines are the
// medians, for test/bench.
import { execFileSync, spawn } from 'node:child_process'
import { existsSync, mkdtempSync, openSync, readFileSync, readdirSync, rmSync } from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { basename, join, resolve } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import { figure, printFigures, stop } from './bench-kit.mjs'

const require = createRequire(new URL('../demo/package.json', import.meta.url))
const { Sandbox } = require('@e2b/code-interpreter')
const MiB = 1 << 20
const size = 64 * MiB
const content = new Blob([Buffer.alloc(size, 'x')])

const median = (xs) => xs.toSorted((a, b) => a - b)[xs.length >> 1]

// The CPU that a process's threads have used, in ms.
function cpuOfProcess(pid) {
  let ns = 0
  for (const t of readdirSync(`/proc/${pid}/task`)) {
    try {
      ns += Number(readFileSync(`/proc/${pid}/task/${t}/schedstat`, 'utf8').split(' ')[0])
    } catch {
      // It has ended.
    }
  }
  return ns / 1e6
}

// The cgroup of all sandboxes of the server on a data directory. A sandbox's own cgroup has
// not the sandbox's name, but that of the prepared one that it was made of. Prepared ones wait
// and use nothing.
function cgroupOf(data) {
  for (const root of ['/sys/fs/cgroup/cpuacct/postern', '/sys/fs/cgroup/postern']) {
    if (!existsSync(root)) continue
    for (const server of readdirSync(root)) {
      const procs = execFileSync('find', [join(root, server), '-name', 'cgroup.procs', '-exec', 'cat', '{}', '+'], { encoding: 'utf8' })
      for (const pid of procs.split('\n').filter(Boolean)) {
        try {
          if (readFileSync(`/proc/${pid}/cmdline`, 'utf8').includes(`${data}/`)) return join(root, server)
        } catch {
          // It has ended.
        }
      }
    }
  }
  throw new Error(`no cgroup has the sandboxes of ${data}`)
}

// The CPU that a cgroup has used, in ms.
function cpuOfCgroup(dir) {
  const v1 = join(dir, 'cpuacct.usage')
  if (existsSync(v1)) return Number(readFileSync(v1, 'utf8')) / 1e6
  return Number(readFileSync(join(dir, 'cpu.stat'), 'utf8').match(/usage_usec (\d+)/)[1]) / 1e3
}

const cleanUp = []
process.on('exit', () => cleanUp.forEach((f) => f()))

// A program with one sandbox.
async function start(program, port) {
  const dir = mkdtempSync(join(tmpdir(), 'postern-bench-'))
  const log = join(dir, 'log')
  const out = openSync(log, 'w')
  const server = spawn(resolve(program), ['up', '--data', dir, '--listen', `127.0.0.1:${port}`, '--smtp', `127.0.0.1:${port + 25}`, '--snapshots', '--pool-min', '0', '--pool-max', '0'], { stdio: ['ignore', out, out] })
  cleanUp.push(() => {
    stop(server)
    rmSync(dir, { recursive: true, force: true })
  })
  for (let i = 0; !readFileSync(log, 'utf8').includes('made snapshot of template'); i++) {
    if (i > 1200) throw new Error(readFileSync(log, 'utf8'))
    await sleep(100)
  }
  const url = `http://127.0.0.1:${port}`
  const box = await Sandbox.create({ apiUrl: url, sandboxUrl: url, apiKey: readFileSync(join(dir, 'project.key'), 'utf8').trim() })
  const end = async () => {
    await box.kill()
    const ended = new Promise((r) => server.on('exit', r))
    server.kill('SIGTERM')
    await ended
  }
  const cgroup = cgroupOf(dir)
  return { name: basename(program), box, end, cpu: () => [cpuOfProcess(server.pid), cpuOfCgroup(cgroup)] }
}

// The floor: fetch as the SDK calls it, and a server that does nothing else.
async function plain() {
  const dir = mkdtempSync(join(tmpdir(), 'postern-bench-'))
  execFileSync('go', ['build', '-o', join(dir, 'plainfiles'), './test/plainfiles'], { cwd: new URL('..', import.meta.url), env: { ...process.env, CGO_ENABLED: '0' } })
  const server = spawn(join(dir, 'plainfiles'), { stdio: ['ignore', 'pipe', 'inherit'] })
  cleanUp.push(() => {
    server.kill('SIGKILL')
    rmSync(dir, { recursive: true, force: true })
  })
  const addr = String(await new Promise((r) => server.stdout.once('data', r))).trim()
  const url = `http://${addr}/files`
  const check = async (r) => {
    if (!r.ok) throw new Error(await r.text())
    return r
  }
  return {
    name: 'node alone',
    box: {
      files: {
        async write(path, data, opts) {
          if (opts?.useOctetStream) return check(await fetch(url, { method: 'POST', body: data, headers: { 'Content-Type': 'application/octet-stream' } }))
          const form = new FormData()
          form.append('file', data, path)
          return check(await fetch(url, { method: 'POST', body: form }))
        },
        async read(_path, opts) {
          const r = await check(await fetch(url))
          if (opts.format === 'stream') return r.body
          if (opts.format === 'text') return r.text()
          return new Uint8Array(await r.arrayBuffer())
        },
      },
    },
    cpu: () => [cpuOfProcess(server.pid), 0],
    end: async () => server.kill('SIGKILL'),
  }
}

const read = async (box, format) => {
  const got = await box.files.read('/tmp/big', { format })
  let n = got.length
  if (format === 'stream') {
    n = 0
    for await (const c of got) n += c.length
  }
  if (n !== size) throw new Error(`read ${n} of ${size} bytes`)
}
const work = {
  'write, multipart': (box) => box.files.write('/tmp/big', content),
  'write, octet-stream': (box) => box.files.write('/tmp/big', content, { useOctetStream: true }),
  'read, stream': (box) => read(box, 'stream'),
  'read, bytes': (box) => read(box, 'bytes'),
  'read, text': (box) => read(box, 'text'),
}

const args = process.argv.slice(2)
const runs = /^\d+$/.test(args.at(-1)) ? Number(args.pop()) : 7
const sides = []
for (const [i, program] of args.entries()) sides.push(await start(program, 3500 + 50 * i))
sides.push(await plain())
const only = process.env.ONLY?.split(';')
for (const side of sides) await side.box.files.write('/tmp/big', content) // a read may be measured alone
for (const [name, f] of Object.entries(work)) {
  if (only && !only.includes(name)) continue
  const seen = sides.map(() => ({ ms: [], node: [], server: [], sandbox: [] }))
  for (let i = 0; i < runs + 1; i++) {
    for (const [k, side] of sides.entries()) {
      const before = side.cpu()
      const c0 = process.cpuUsage()
      const t = performance.now()
      await f(side.box)
      const ms = performance.now() - t
      const c = process.cpuUsage(c0)
      const after = side.cpu()
      if (i === 0) continue // buffers grow, and node compiles
      seen[k].ms.push(ms)
      seen[k].node.push((c.user + c.system) / 1000)
      seen[k].server.push(after[0] - before[0])
      seen[k].sandbox.push(after[1] - before[1])
    }
  }
  const floor = median(seen.at(-1).ms)
  for (const [k, s] of seen.entries()) {
    const rate = (ms) => (size / 1000 / ms).toFixed(0).padStart(5)
    const ms = median(s.ms)
    figure('Files', `${name}, 64 MiB: ${sides[k].name}`, s.ms.length, size / 1000 / ms, 'MB/s')
    console.log(`${`${name}, 64 MiB: ${sides[k].name}`.padEnd(52)} p50 ${rate(ms)}  best ${rate(Math.min(...s.ms))} MB/s  CPU ${median(s.node).toFixed(0)} node + ${median(s.server).toFixed(0)} server + ${median(s.sandbox).toFixed(0)} sandbox ms   ${(floor / ms).toFixed(2)} of node alone  (n=${s.ms.length})`)
  }
}
// What a request costs, whatever its size.
const small = new Blob(['x'.repeat(1024)])
const hundred = Array.from({ length: 100 }, (_, i) => ({ path: `/tmp/small/${i}`, data: small }))
const requests = {
  'write 1 KiB': (box) => box.files.write('/tmp/one', small),
  'read 1 KiB': (box) => box.files.read('/tmp/one'),
  'write 100 files of 1 KiB, one call': (box) => box.files.write(hundred),
  'list 1,000 entries': (box) => box.files.list('/tmp/many'),
}
const programs = sides.slice(0, -1)
for (const side of programs) await side.box.files.write('/tmp/one', small)
for (const side of programs) await side.box.commands.run('mkdir /tmp/many && cd /tmp/many && touch $(seq 1000)')
for (const [name, f] of Object.entries(requests)) {
  if (only && !only.includes(name)) continue
  const seen = programs.map(() => ({ ms: [], server: [], sandbox: [] }))
  for (let i = 0; i < 4 * runs + 1; i++) {
    for (const [k, side] of programs.entries()) {
      const before = side.cpu()
      const t = performance.now()
      await f(side.box)
      const ms = performance.now() - t
      const after = side.cpu()
      if (i === 0) continue
      seen[k].ms.push(ms)
      seen[k].server.push(after[0] - before[0])
      seen[k].sandbox.push(after[1] - before[1])
    }
  }
  for (const [k, s] of seen.entries()) {
    figure('Files', `${name}: ${sides[k].name}`, s.ms.length, median(s.ms), 'ms')
    console.log(`${`${name}: ${sides[k].name}`.padEnd(52)} p50 ${median(s.ms).toFixed(1)}  best ${Math.min(...s.ms).toFixed(1)} ms  CPU ${median(s.server).toFixed(1)} server + ${median(s.sandbox).toFixed(1)} sandbox ms  (n=${s.ms.length})`)
  }
}
await Promise.all(sides.map((s) => s.end()))
printFigures()
process.exit(0)
