// Measures the real binary through the official SDK. Figures are of one run on
// one machine; compare ratios, not milliseconds. Three servers run one after
// the other on the same root file system: one whose sandboxes boot, one whose
// sandboxes are restored from the template's snapshot when they are asked for,
// and one that has restored some beforehand. Beside a figure stands its floor:
// the least that the same work takes by other means, in the same run.
//
//   node test/bench.mjs POSTERN [RUNS] [DENSITY] [RUNSC]
//
// With RUNSC, gVisor's own program, plain gVisor starts the same root file system.
// ONLY=create;command in the environment selects among create, command, pause, memory and
// density. The last lines are the medians, for test/bench.
// test/bench-files.mjs measures file transfers.
import { execFileSync, spawn } from 'node:child_process'
import { mkdirSync, mkdtempSync, openSync, readFileSync, readdirSync, realpathSync, rmSync, writeFileSync } from 'node:fs'
import { Agent, request } from 'node:http'
import { createRequire } from 'node:module'
import { cpus, loadavg, tmpdir } from 'node:os'
import { join, resolve } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import { figure, printFigures, stop } from './bench-kit.mjs'

const require = createRequire(new URL('../demo/package.json', import.meta.url))
const { Sandbox } = require('@e2b/code-interpreter')
const postern = resolve(process.argv[2])
const runs = Number(process.argv[3] ?? 20)
const density = Number(process.argv[4] ?? 0)
const runsc = process.argv[5]
const sections = ['create', 'command', 'pause', 'memory', 'density']
const only = process.env.ONLY ? process.env.ONLY.split(';') : sections
for (const x of only) if (!sections.includes(x)) throw new Error(`ONLY=${x}: there are ${sections.join(', ')}`)
const wants = (...xs) => xs.some((x) => only.includes(x))

const percentile = (xs, p) => xs.toSorted((a, b) => a - b)[Math.min(xs.length - 1, Math.floor(xs.length * p))]
const median = (xs) => percentile(xs, 0.5)
// Milliseconds are shown as a part of a cold start too, once that is known.
let coldStart = 0
function report(name, xs, unit = 'ms', digits = 1, faster = 0) {
  figure('Sandbox', name, xs.length, median(xs), unit)
  const f = (x) => x.toFixed(digits)
  let ratio = ''
  if (faster) ratio = `   ${(faster / median(xs)).toFixed(1)} × faster than cold`
  else if (coldStart && unit === 'ms') ratio = `   ${(median(xs) / coldStart).toFixed(2)} of a cold start`
  console.log(`${name.padEnd(52)} p50 ${f(median(xs))}  p95 ${f(percentile(xs, 0.95))}  p99 ${f(percentile(xs, 0.99))} ${unit}  (n=${xs.length})${ratio}`)
  return median(xs)
}
// reportOne is of a figure that is measured once, of n things.
function reportOne(name, value, unit, digits, n, more = '') {
  figure('Sandbox', name, n, value, unit)
  console.log(`${name.padEnd(52)} ${value.toFixed(digits)} ${unit}${more}`)
}
function section(name) {
  console.log(`\n${name} (load ${loadavg()[0].toFixed(1)} on ${cpus().length} processors)`)
}
// cpu returns the seconds that all processors have worked for others than this program.
function cpu() {
  const [user, nice, system, , , irq, softirq] = readFileSync('/proc/stat', 'utf8').match(/^cpu +(.*)/)[1].split(' ').map(Number)
  const own = process.cpuUsage()
  return (user + nice + system + irq + softirq) / 100 - (own.user + own.system) / 1e6
}
async function time(f) {
  const t = performance.now()
  await f()
  return performance.now() - t
}

// A server on its own data directory, ended when the work is done.
async function serve(flags, work) {
  const dir = mkdtempSync(join(tmpdir(), 'postern-bench-'))
  const log = join(dir, 'log')
  const out = openSync(log, 'w')
  const server = spawn(postern, ['up', '--data', dir, '--listen', '127.0.0.1:3400', '--smtp', '127.0.0.1:3425', '--max-sandboxes', '400', '--snapshots', ...flags], {
    stdio: ['ignore', out, out],
  })
  const ended = new Promise((r) => server.on('exit', r))
  const kill = () => {
    stop(server)
    rmSync(dir, { recursive: true, force: true })
  }
  process.on('exit', kill)
  const said = async (text) => {
    for (let i = 0; !readFileSync(log, 'utf8').includes(text); i++) {
      if (i > 1200) throw new Error(readFileSync(log, 'utf8'))
      await sleep(100)
    }
  }
  await said('/setup.link')
  if (!flags.includes('--cold')) await said('made snapshot of template')
  process.env.E2B_API_URL = process.env.E2B_SANDBOX_URL = 'http://127.0.0.1:3400'
  process.env.E2B_API_KEY = readFileSync(join(dir, 'project.key'), 'utf8').trim()
  try {
    return await work(dir)
  } finally {
    server.kill('SIGTERM')
    await ended
    process.off('exit', kill)
    rmSync(dir, { recursive: true, force: true })
  }
}

// All processes of sandboxes are in cgroups below "postern".
function memoryMB() {
  let kb = 0
  const seen = new Set()
  for (const pid of readdirSync('/proc').filter((p) => /^\d+$/.test(p))) {
    try {
      const cgroup = readFileSync(`/proc/${pid}/cgroup`, 'utf8')
      if (!/\/postern/.test(cgroup)) continue
      // Several processes run in one address space: gVisor's stubs. They would
      // be counted once each, and are known by having all figures alike.
      const rollup = readFileSync(`/proc/${pid}/smaps_rollup`, 'utf8')
      const space = [cgroup, readFileSync(`/proc/${pid}/statm`, 'utf8'), rollup].join()
      if (seen.has(space)) continue
      seen.add(space)
      kb += Number(rollup.match(/^Pss:\s+(\d+)/m)[1])
    } catch {
      // It has ended.
    }
  }
  return kb / 1024
}

// rest is how long to wait between two creates: the pool refills meanwhile.
async function starts(rest) {
  const echo = []
  const python = []
  const work = []
  for (let i = 0; i < runs; i++) {
    let s
    await sleep(rest)
    const before = cpu()
    echo.push(await time(async () => {
      s = await Sandbox.create()
      await s.commands.run('echo')
    }))
    work.push((cpu() - before) * 1000)
    await s.kill()
    await sleep(100) // what is left of it goes meanwhile
  }
  for (let i = 0; i < Math.min(runs, 10); i++) {
    let s
    await sleep(rest)
    python.push(await time(async () => {
      s = await Sandbox.create()
      await s.runCode('1')
    }))
    await s.kill()
  }
  return { echo, python, work }
}


// A program that does nothing but exit(0): x86-64, without a library. To start it
// is the floor of every command.
const nothing = (() => {
  const b = Buffer.alloc(129)
  b.write('\x7fELF\x02\x01\x01', 0, 'latin1')
  b.writeUInt16LE(2, 16) // executable
  b.writeUInt16LE(62, 18) // x86-64
  b.writeUInt32LE(1, 20)
  b.writeBigUInt64LE(0x400078n, 24) // entry
  b.writeBigUInt64LE(64n, 32) // program headers
  b.writeUInt16LE(64, 52)
  b.writeUInt16LE(56, 54)
  b.writeUInt16LE(1, 56)
  b.writeUInt32LE(1, 64) // PT_LOAD
  b.writeUInt32LE(5, 68) // readable, executable
  b.writeBigUInt64LE(0x400000n, 80)
  b.writeBigUInt64LE(0x400000n, 88)
  b.writeBigUInt64LE(129n, 96)
  b.writeBigUInt64LE(129n, 104)
  b.writeBigUInt64LE(0x1000n, 112)
  Buffer.from('b83c00000031ff0f05', 'hex').copy(b, 120) // mov eax, 60; xor edi, edi; syscall
  return b
})()

// Starts each program 60 times inside, and prints the median in milliseconds.
const spawnInside = `
import json, os, statistics, time
out = {}
for name, argv in [('static', ['/tmp/nothing']), ('true', ['/bin/true']), ('sh', ['/bin/sh', '-c', 'true']), ('bash', ['/bin/bash', '-l', '-c', 'true'])]:
    took = []
    for _ in range(60):
        t = time.perf_counter()
        os.waitpid(os.posix_spawn(argv[0], argv, os.environ), 0)
        took.append((time.perf_counter() - t) * 1000)
    out[name] = statistics.median(took)
print(json.dumps(out))
`

// rawCommand runs "true" by the guest's protocol, Connect with JSON over a kept
// connection, without an SDK.
function rawCommand(sandbox) {
  const agent = new Agent({ keepAlive: true, maxSockets: 1 })
  const json = Buffer.from(JSON.stringify({ process: { cmd: '/bin/bash', args: ['-l', '-c', 'true'] } }))
  const body = Buffer.concat([Buffer.from([0, 0, 0, 0, json.length]), json])
  const url = new URL('/process.Process/Start', process.env.E2B_SANDBOX_URL)
  const headers = {
    'Content-Type': 'application/connect+json', 'Connect-Protocol-Version': '1', 'Content-Length': body.length, 'E2b-Sandbox-Id': sandbox.sandboxId,
    'E2b-Sandbox-Port': '49983', Authorization: 'Basic ' + Buffer.from('user:').toString('base64'),
  }
  if (sandbox.envdAccessToken) headers['X-Access-Token'] = sandbox.envdAccessToken
  return () => new Promise((done, fail) => {
    const r = request(url, { agent, method: 'POST', headers }, (answer) => {
      const parts = []
      answer.on('data', (b) => parts.push(b))
      answer.on('end', () => {
        const text = Buffer.concat(parts).toString()
        if (answer.statusCode === 200 && /"exited":\s*true/.test(text)) done()
        else fail(new Error(`${answer.statusCode} ${text}`))
      })
    })
    r.on('error', fail)
    r.end(body)
  })
}

// plain measures gVisor's own program on the same root file system: a boot of bash,
// without network, cgroup and disk limit.
function plain() {
  const bundle = mkdtempSync(join(tmpdir(), 'postern-runsc-'))
  try {
    const image = realpathSync(join(process.env.POSTERN_CACHE ?? '/var/cache/postern', 'base-current'))
    mkdirSync(join(bundle, 'rootfs'))
    writeFileSync(join(bundle, 'config.json'), JSON.stringify({
      ociVersion: '1.0.2', root: { path: join(bundle, 'rootfs'), readonly: true },
      annotations: { 'dev.gvisor.spec.rootfs.source': image, 'dev.gvisor.spec.rootfs.type': 'erofs', 'dev.gvisor.spec.rootfs.overlay': 'memory' },
      process: { args: ['/bin/bash', '-l', '-c', 'echo'], cwd: '/', env: ['PATH=/usr/bin:/bin'], user: { uid: 0, gid: 0 } },
      mounts: [{ destination: '/proc', type: 'proc', source: 'proc' }, { destination: '/tmp', type: 'tmpfs', source: 'tmpfs' }],
      linux: { namespaces: ['pid', 'network', 'ipc', 'uts', 'mount'].map((type) => ({ type })) },
    }))
    const took = []
    for (let i = 0; i < 15; i++) {
      const t = performance.now()
      // gVisor leaves a mount; it goes with a mount namespace.
      execFileSync('unshare', ['-m', resolve(runsc), '--root', join(bundle, 'state'), '--ignore-cgroups', '--network=none', '--platform=systrap', 'run', '--bundle', bundle, `bench${process.pid}x${i}`], { stdio: 'ignore', cwd: bundle })
      took.push(performance.now() - t)
    }
    report('  peer: runsc run, boot to the end of "echo"', took)
  } finally {
    rmSync(bundle, { recursive: true, force: true })
  }
}

// forks measures how long a sandbox stands still while five copies of it are made,
// and when all five answer. A program inside notes the longest pause of its own.
async function forks() {
  const answer = []
  const still = []
  for (let i = 0; i < 5; i++) {
    const s = await Sandbox.create()
    await s.files.write('/tmp/tick.py', `
import time
last, longest = time.perf_counter(), 0.0
while True:
    time.sleep(0.002)
    now = time.perf_counter()
    if now - last > longest:
        longest = now - last
        open('/tmp/longest', 'w').write(str(longest))
    last = now
`)
    await s.commands.run('python3 /tmp/tick.py', { background: true })
    await sleep(1500)
    await s.commands.run('rm -f /tmp/longest')
    let copies
    answer.push(await time(async () => {
      const r = await fetch(`${process.env.E2B_API_URL}/sandboxes/${s.sandboxId}/fork`, {
        method: 'POST', headers: { 'X-API-Key': process.env.E2B_API_KEY, 'Content-Type': 'application/json' }, body: JSON.stringify({ count: 5, timeout: 300 }),
      })
      if (!r.ok) throw new Error(`fork: ${r.status} ${await r.text()}`)
      copies = (await r.json()).map((x) => x.sandbox ?? x)
      await Promise.all(copies.map(async (x) => (await Sandbox.connect(x.sandboxID)).commands.run('true')))
    }))
    await sleep(300)
    const longest = await s.commands.run('cat /tmp/longest 2>/dev/null || echo 0')
    still.push(Number(longest.stdout) * 1000)
    await Promise.all([s.kill(), ...copies.map((x) => Sandbox.kill(x.sandboxID))])
    await sleep(1000)
  }
  report('fork: five copies have run a command', answer)
  report('fork: the longest pause of a program in the parent', still)
}

async function createCold() {
  section('Starts')
  const { echo, python, work } = await starts(0)
  const c = { echo: report('cold start: create → first echo', echo), python: report('cold start: create → first runCode', python) }
  report('  cold start: processor time meanwhile', work)
  return c
}

async function createFromSnapshot() {
  // The server prepares the next sandboxes in the time between two.
  const { echo, python, work } = await starts(1000)
  report('from snapshot: create → first echo', echo, 'ms', 1, cold.echo)
  report('from snapshot: create → first runCode', python, 'ms', 1, cold.python)
  report('  from snapshot: processor time meanwhile', work)
}

async function createFromPool() {
  const { echo, python } = await starts(1000)
  report('from the pool: create → first echo', echo, 'ms', 1, cold.echo)
  report('from the pool: create → first runCode', python, 'ms', 1, cold.python)
}

async function commands() {
  section('Commands')
  const s = await Sandbox.create()
  await sleep(3000) // the pool is full again
  const each = async (n, f) => {
    const took = []
    for (let i = 0; i < n; i++) took.push(await time(f))
    return took
  }
  const began = cpu()
  report('commands.run("true")', await each(200, () => s.commands.run('true')))
  reportOne('  processor time of each', (cpu() - began) * 5, 'ms', 1, 200)
  report('commands.run("/bin/true")', await each(100, () => s.commands.run('/bin/true')))
  report('commands.run("true", {cwd: "/tmp"})', await each(100, () => s.commands.run('true', { cwd: '/tmp' })))
  report('commands.run("true", {user: "root"})', await each(100, () => s.commands.run('true', { user: 'root' })))
  report('  floor: "true" by the protocol, without SDK', await each(200, rawCommand(s)))
  await s.files.write('/tmp/nothing', new Blob([nothing]))
  await s.commands.run('chmod +x /tmp/nothing')
  await s.files.write('/tmp/spawn.py', spawnInside)
  const inside = JSON.parse((await s.commands.run('python3 /tmp/spawn.py')).stdout)
  for (const [name, ms] of Object.entries(inside)) figure('Sandbox', `floor: a process inside, ${name}`, 60, ms, 'ms')
  console.log(`${'  floor: a process inside, p50'.padEnd(52)} nothing ${inside.static.toFixed(1)}, /bin/true ${inside.true.toFixed(1)}, sh ${inside.sh.toFixed(1)}, bash -l ${inside.bash.toFixed(1)} ms`)
  report('runCode("1"), warm', await each(50, () => s.runCode('1')))
  await s.kill()
}

async function pauses() {
  section('Pause, resume, fork')
  const s = await Sandbox.create()
  // 256 MiB of memory that no compression and no zero page makes smaller.
  await s.runCode('import os; dirty = bytearray(os.urandom(256 << 20))')
  const pause = []
  const resume = []
  for (let i = 0; i < 7; i++) {
    await s.runCode('dirty[0] ^= 1')
    pause.push(await time(() => s.pause()))
    resume.push(await time(() => s.connect()))
  }
  const later = []
  for (let i = 0; i < 7; i++) {
    await s.runCode('dirty[0] ^= 1')
    await s.pause()
    await sleep(1500) // the processes of before have ended
    later.push(await time(() => s.connect()))
  }
  report('pause, 256 MiB dirty', pause)
  report('resume, 256 MiB dirty, at once', resume)
  report('resume, 256 MiB dirty, later', later)
  await s.kill()
  await forks()
}

async function memory() {
  section('Memory')
  await sleep(2000)
  const before = memoryMB()
  const many = []
  for (let i = 0; i < 10; i++) many.push(await Sandbox.create())
  await Promise.all(many.map((x) => x.runCode('1')))
  await sleep(12_000) // the pool has shrunk again
  reportOne('memory of a sandbox with its interpreter', (memoryMB() - before) / many.length, 'MiB', 1, many.length, ' PSS (of 10)')
  await Promise.all(many.map((x) => x.kill()))
}

async function many() {
  section(`${density} sandboxes`)
  const all = []
  const made = []
  const before = cpu()
  for (let i = 0; i < density; i += 4) {
    await Promise.all(Array.from({ length: Math.min(4, density - i) }, async () => made.push(await time(async () => all.push(await Sandbox.create({ timeoutMs: 3600_000 }))))))
  }
  const c = report(`create, ${density} in all, four at a time`, made)
  console.log(`${'  its p95 to its p50'.padEnd(52)} ${(percentile(made, 0.95) / c).toFixed(1)}`)
  reportOne(`  processor time of each of ${density}`, (cpu() - before) / density, 's', 3, density)
  const answer = []
  for (const s of all) answer.push(await time(() => s.commands.run('true')))
  report(`a command in each of ${density}`, answer)
  reportOne(`memory of ${density}`, memoryMB() / density, 'MiB', 1, density, ' PSS each')
  await Promise.all(all.map((x) => x.kill()))
}

let cold = { echo: 0, python: 0 } // medians
if (wants('create')) {
  cold = await serve(['--cold'], createCold)
  if (runsc) plain()
  coldStart = cold.echo
  await serve(['--pool-max', '0', '--pool-min', '0'], createFromSnapshot)
}
if (wants('create', 'command', 'pause', 'memory')) {
  await serve(['--pool-min', '2'], async () => {
    if (wants('create')) await createFromPool()
    if (wants('command')) await commands()
    if (wants('pause')) await pauses()
    if (wants('memory')) await memory()
  })
}
if (wants('density') && density) await serve(['--pool-max', '0', '--pool-min', '0'], many)
printFigures()
