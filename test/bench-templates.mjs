// Measures templates through the official SDK: a build of 20 steps without and with its
// layers, sandboxes of a template with a start command beside those of base, pair by
// pair, and what ten templates on one base take on the disk beside one.
//
//   node test/bench-templates.mjs POSTERN [RUNS]
import { execFileSync, spawn } from 'node:child_process'
import { mkdtempSync, openSync, readdirSync, readFileSync, rmSync, statSync } from 'node:fs'
import { createRequire } from 'node:module'
import { cpus, loadavg, tmpdir } from 'node:os'
import { join, resolve } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import { figure, printFigures, stop } from './bench-kit.mjs'

const require = createRequire(new URL('../demo/package.json', import.meta.url))
const { Sandbox, Template, waitForFile } = require('@e2b/code-interpreter')
const runs = Number(process.argv[3] ?? 30)
const median = (xs) => xs.toSorted((a, b) => a - b)[xs.length >> 1]
const line = (name, text) => console.log(`${name.padEnd(52)} ${text}`)
async function time(f) {
  const t = performance.now()
  await f()
  return performance.now() - t
}

const dir = mkdtempSync(join(tmpdir(), 'postern-bench-'))
const log = join(dir, 'log')
const out = openSync(log, 'w')
const server = spawn(resolve(process.argv[2]), ['up', '--data', dir, '--listen', '127.0.0.1:3400', '--smtp', '127.0.0.1:3425', '--pool-min', '0', '--pool-max', '0'], { stdio: ['ignore', out, out] })
const ended = new Promise((r) => server.on('exit', r))
process.on('exit', () => {
  stop(server)
  rmSync(dir, { recursive: true, force: true })
})
for (let i = 0; !readFileSync(log, 'utf8').includes('made snapshot of template'); i++) {
  if (i > 1200) throw new Error(readFileSync(log, 'utf8'))
  await sleep(100)
}
process.env.E2B_API_URL = process.env.E2B_SANDBOX_URL = 'http://127.0.0.1:3400'
process.env.E2B_API_KEY = readFileSync(join(dir, 'project.key'), 'utf8').trim()

// What is below templates on the disk, in MB.
const disk = () => Number(execFileSync('du', ['-sk', join(dir, 'templates')], { encoding: 'utf8' }).split('\t')[0]) / 1024

console.log(`Templates (load ${loadavg()[0].toFixed(1)} on ${cpus().length} processors)`)
let steps = Template().fromTemplate('base')
for (let i = 0; i < 20; i++) steps = steps.runCmd(`mkdir -p ~/step && head -c 100000 /dev/urandom > ~/step/${i}`)
for (const name of ['20 steps, no layer exists', '20 steps, all layers exist']) {
  const s = (await time(() => Template.build(steps, 'bench-steps'))) / 1000
  figure('Templates', name, 1, s, 's')
  line(name, `${s.toFixed(1)} s`)
}

const started = Template().fromTemplate('base').runCmd('echo of the template > ~/note').setStartCmd('touch /tmp/started && sleep infinity', waitForFile('/tmp/started'))
await Template.build(started, 'bench-started')
const echo = { base: [], 'bench-started': [] }
for (let i = 0; i <= runs; i++) {
  for (const name of Object.keys(echo)) {
    let s
    const took = await time(async () => {
      s = await Sandbox.create(name)
      await s.commands.run('echo')
    })
    if (i > 0) echo[name].push(took) // the first may boot
    await s.kill()
    await sleep(200)
  }
}
const [base, custom] = Object.values(echo).map(median)
figure('Templates', 'create → echo, base', runs, base, 'ms')
figure('Templates', 'create → echo, template with a start command', runs, custom, 'ms')
line('create → echo, base, p50', `${base.toFixed(0)} ms`)
line('create → echo, template with a start command, p50', `${custom.toFixed(0)} ms, ${(custom / base).toFixed(2)} of base (n=${runs})`)

// Beside each other, with their base: that is the largest file, or a copy of it.
const images = join(dir, 'templates', 'images')
const size = Math.max(...readdirSync(images).map((f) => statSync(join(images, f)).size)) / 2 ** 20
const before = disk()
const more = []
for (let i = 0; i < 10; i++) {
  await Template.build(Template().fromTemplate('base').runCmd(`head -c 2000000 /dev/urandom > ~/file${i}`), `bench-disk${i}`)
  more.push(disk() - before)
}
line('ten templates with base on the disk, beside one', `${(size + more[9]).toFixed(0)} MB, ${((size + more[9]) / (size + more[0])).toFixed(2)} × one; each takes ${(more[9] / 10).toFixed(1)} MB`)
figure('Templates', 'disk of each further template', 10, more[9] / 10, 'MB')
server.kill('SIGTERM')
await ended
printFigures()
