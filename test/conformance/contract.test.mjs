// Sandboxes that a contract binds, created with the unmodified official SDK and the metadata
// postern.contract.
import assert from 'node:assert/strict'
import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { after, before, describe, it } from 'node:test'
import { Sandbox } from 'e2b'
import { start } from './server.mjs'

const text = (more = '') => `version: 1
name: sums
template: base
commands:
  allow:
    - run: bash **
    - run: python3 **
    - run: id
${more}files:
  write: [/work]
limits:
  time: 10m
`
const metadata = { 'postern.contract': 'sums' }

describe('contract', () => {
  let server, sandbox
  const file = (name, content) => {
    writeFileSync(join(server.data, name), content)
    return join(server.data, name)
  }
  // approved approves the action that an error names.
  const approved = async (err) => {
    const action = err.message.match(/act_[A-Z2-7]{26}/)?.[0]
    assert.ok(action, err.message)
    await server.postern('approve', action)
  }
  before(async () => {
    server = await start('--pool-max', '0', '--pool-min', '0')
    await server.postern('contract', 'put', file('sums.yaml', text()))
  })
  after(() => server.stop())

  it('creates nothing before a person has approved the contract', async () => {
    await assert.rejects(Sandbox.create({ metadata: { 'postern.contract': 'none' } }), /there is no contract/)
    const refused = await Sandbox.create({ metadata, timeoutMs: 300_000 }).then(() => assert.fail('it was created'), (err) => err)
    assert.equal((await server.api('GET', '/v2/sandboxes')).json.length, 0)
    await approved(refused)
    for (let i = 0; ; i++) { // an approval takes effect a moment later
      try {
        sandbox = await Sandbox.create({ metadata, timeoutMs: 300_000 })
        break
      } catch (err) {
        if (i === 50 || !/act_/.test(err.message)) throw err
        await new Promise((done) => setTimeout(done, 100))
      }
    }
    const info = await sandbox.getInfo()
    assert.match(info.metadata['postern.contract'], /^sums@sha256:[0-9a-f]{64}$/)
  })

  it('starts what the contract allows and nothing else', async () => {
    const ok = await sandbox.commands.run('python3 -c "print(6*7)"')
    assert.deepEqual([ok.exitCode, ok.stdout], [0, '42\n'])
    const copy = 'python3 -c "import shutil; shutil.copy(\'/usr/bin/env\', \'/work/python3\')"'
    assert.equal((await sandbox.commands.run(`${copy} && test -x /work/python3`)).exitCode, 0)
    for (const program of ['env true', '/usr/bin/env true', '/work/python3 --version', 'PATH=/work:$PATH python3 --version', 'exec -a python3 env true'])
      await assert.rejects(sandbox.commands.run(program), (err) => err.exitCode === 126 || /denied/i.test(err.stderr + err.message), program)
  })

  it('runs nothing as root, whichever user the caller names', async () => {
    for (const user of ['root', undefined]) {
      const r = await sandbox.commands.run('id', { user }).catch((err) => err)
      assert.doesNotMatch(String(r.stdout), /uid=0/)
    }
    await assert.rejects(sandbox.commands.run('python3 -c "open(\'/etc/x\', \'w\')"', { user: 'root' }), (err) => /PermissionError/.test(err.stderr))
  })

  it('reads and writes files where the contract names them, and nowhere else', async () => {
    await sandbox.commands.run('python3 -c "open(\'/work/out.csv\', \'w\').write(\'a\')"')
    assert.equal(await sandbox.files.read('/work/out.csv'), 'a')
    await sandbox.files.write('/work/in.csv', 'x')
    assert.deepEqual((await sandbox.files.list('/work')).map((f) => f.name).sort(), ['in.csv', 'out.csv', 'python3'])
    for (const path of ['/etc/x', '/root/x', '/usr/bin/x', '/home/user/x', '/tmp/x']) await assert.rejects(sandbox.files.write(path, 'x'), undefined, path)
    for (const path of ['/run/postern/state', '/home/user/.bashrc', '/root/.bashrc']) await assert.rejects(sandbox.files.read(path), undefined, path)
    await assert.rejects(sandbox.files.watchDir('/work', () => {}), /403/)
  })

  it('refuses access to ports, snapshots, forks and network changes', async () => {
    const port = await fetch(server.url, { headers: { 'E2b-Sandbox-Id': sandbox.sandboxId, 'E2b-Sandbox-Port': '8000', 'E2b-Traffic-Access-Token': sandbox.trafficAccessToken } })
    assert.equal(port.status, 403)
    const id = sandbox.sandboxId
    for (const [method, path, body] of [
      ['POST', `/sandboxes/${id}/snapshots`, {}],
      ['POST', `/sandboxes/${id}/fork`, {}],
      ['PUT', `/sandboxes/${id}/network`, { allowOut: ['example.com'] }],
    ]) {
      const r = await server.api(method, path, body)
      assert.equal(r.status, 403, `${method} ${path}: ${r.text}`)
    }
  })

  it('refuses an unreviewed contract of the same name, and fields that the contract decides on', async () => {
    await assert.rejects(Sandbox.create({ metadata: { ...metadata, 'postern.secrets': 'demo' } }), /the contract decides/)
    await assert.rejects(Sandbox.create({ metadata, network: { allowOut: ['example.com'] } }), /the contract decides/)
    await assert.rejects(Sandbox.create({ metadata, envs: { TOKEN: '${e2b.secrets.demo}' } }), /the contract decides/)
    await server.postern('contract', 'put', file('wider.yaml', text('    - run: curl **\n')))
    await assert.rejects(Sandbox.create({ metadata }), /act_/)
    await server.postern('boundary', 'set', file('boundary.yaml', text()))
    await assert.rejects(Sandbox.create({ metadata }), /commands/)
  })

  it('is killed like any other sandbox', async () => {
    assert.equal(await sandbox.kill(), true)
    assert.equal((await server.api('GET', '/v2/sandboxes')).json.length, 0)
    const run = JSON.parse(await server.postern('runs', 'list', '--json')).find((r) => r.sandbox === sandbox.sandboxId)
    for (let i = 0; i < 100 && !/"signed": true/.test(await server.postern('runs', 'report', run.id, '--json').catch(() => '')); i++) await new Promise((done) => setTimeout(done, 100))
    assert.match(await server.postern('runs', 'statement', run.id), /"payloadType"/)
  })
})
