// Templates, as the official SDK builds them: steps, files, cache, tags, failures and
// what sandboxes get. serveImages of test/e2e says which images the registries at REGISTRY
// and REGISTRY_PRIVATE have.
import assert from 'node:assert/strict'
import { chmodSync, mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, describe, test } from 'node:test'
import * as e2b from 'e2b'
import { eventually, start } from './server.mjs'

const { Sandbox, Template, waitForFile, waitForPort, waitForProcess, waitForTimeout, waitForURL } = e2b
const registry = process.env.REGISTRY
const privateRegistry = process.env.REGISTRY_PRIVATE
let server, context
const made = []
const create = async (...args) => {
  const box = await Sandbox.create(...args)
  made.push(box)
  return box
}
/** build builds a template and returns the build with its log. */
const build = async (template, name, opts = {}) => {
  const lines = []
  const info = await Template.build(template, name, { logsRefreshFrequency: 50, ...opts, onBuildLogs: (l) => lines.push(l) })
  return { ...info, lines, log: lines.map((l) => l.message).join('\n') }
}
/** failure builds a template that does not get ready and returns the error. */
const failure = (template, name, opts) =>
  build(template, name, opts).then(
    () => assert.fail('the build succeeded'),
    (err) => {
      assert.ok(err instanceof e2b.BuildError, `${err.name}: ${err.message}`)
      return err
    },
  )

before(async () => {
  server = await start(...(registry ? ['--registry-allow', `http://${registry}`, '--registry-allow', `http://${privateRegistry}`, '--registry-mirror', `docker.io=http://${registry}`] : []))
  context = mkdtempSync(join(tmpdir(), 'postern-template-'))
  const file = (name, text, mode = 0o644) => {
    writeFileSync(join(context, name), text)
    chmodSync(join(context, name), mode)
  }
  mkdirSync(join(context, 'src/deep/er'), { recursive: true })
  file('one.txt', 'one\n')
  file('run.sh', '#!/bin/sh\necho ran\n', 0o755)
  file('src/a.txt', 'a\n')
  file('src/b.md', 'b\n')
  file('src/deep/er/c.txt', 'c\n')
  file('ignored.log', 'secret\n')
  file('.dockerignore', '*.log\n')
  symlinkSync('a.txt', join(context, 'src/link'))
})
after(async () => {
  await Promise.all(made.map((b) => b.kill()))
  await server?.stop()
  if (context) rmSync(context, { recursive: true, force: true })
})

/** definition has all kinds of steps. */
const definition = (last = 'last') =>
  Template({ fileContextPath: context })
    .fromTemplate('base')
    .setEnvs({ GREETING: 'Hello, world!', PLACE: '$GREETING from here', TICK: 'a`b' })
    .setWorkdir('/app')
    .copy('one.txt', 'renamed.txt')
    .copy('one.txt', 'into/')
    .copy('src', 'tree')
    .copy('src/*.txt', '/opt/globbed/', { user: 'root' })
    .copy('run.sh', '/opt/run.sh', { mode: 0o700, user: 'root' })
    .copy(['one.txt', 'run.sh'], '/app/many/')
    .copy('src/link', 'resolved.txt', { resolveSymlinks: true })
    .runCmd('pwd; whoami; echo "$GREETING|$PLACE|$TICK" >env.txt; echo to stderr >&2')
    .runCmd(['cd /tmp', 'echo chained >/app/chained'])
    .runCmd('whoami >/root-ran', { user: 'root' })
    .makeDir(['made/deep', '/app/other'], { mode: 0o750 })
    .makeSymlink('renamed.txt', 'shortcut')
    .makeSymlink('one', 'shortcut', { force: true })
    .rename('chained', 'moved')
    .runCmd('touch doomed && mkdir -p doomed.d/x')
    .remove(['doomed', 'doomed.d'], { recursive: true, force: true })
    .setUser('builder')
    .runCmd('echo "$(whoami) $HOME $(pwd)" >/tmp/as-builder')
    .setUser('user')
    .setWorkdir('/home/user/work')
    .runCmd(`echo ${last} >last.txt`)
    .setStartCmd('python3 -m http.server 8123 --directory /app', waitForPort(8123))

describe('Template', () => {
  let first

  test('build runs steps of each kind, and sandboxes start with what they left and with the start command running', async () => {
    assert.equal(await Template.exists('everything'), false)
    first = await build(definition(), 'everything', { cpuCount: 1, memoryMB: 512 })
    assert.match(first.templateId, /^[a-z0-9]{20}$/)
    assert.match(first.buildId, /^[0-9a-f]{8}-[0-9a-f-]{27}$/)
    assert.equal(await Template.exists('everything'), true)
    assert.match(first.log, /\[builder [^\]]*\] ENV GREETING Hello, world!/)
    assert.match(first.log, /\[stderr\]: to stderr/)
    assert.ok(first.lines.every((l) => l.timestamp instanceof Date && ['debug', 'info', 'warn', 'error'].includes(l.level)))

    const box = await create('everything', { timeoutMs: 300_000 })
    const info = await box.getInfo()
    assert.deepEqual([info.cpuCount, info.memoryMB], [1, 512])
    const sh = async (cmd, opts) => (await box.commands.run(cmd, opts)).stdout
    assert.equal(await sh('cat /app/renamed.txt /app/into/one.txt /app/resolved.txt /app/many/one.txt'), 'one\none\na\none\n')
    assert.equal(await sh('cd /app/tree && find . | sort | tr "\\n" " "; readlink link'), '. ./a.txt ./b.md ./deep ./deep/er ./deep/er/c.txt ./link a.txt\n')
    assert.equal(await sh('ls /opt/globbed; stat -c "%U:%G %a" /opt/globbed/a.txt /opt/run.sh'), 'a.txt\nroot:root 644\nroot:root 700\n')
    assert.equal(await sh('test -L /app/resolved.txt || echo file'), 'file\n')
    assert.equal(await sh('cat /app/env.txt'), 'Hello, world!|Hello, world! from here|a`b\n')
    assert.equal(await sh('echo "$GREETING|$PLACE"'), 'Hello, world!|Hello, world! from here\n')
    assert.equal(await sh('cat /root-ran /tmp/as-builder'), 'root\nbuilder /home/builder /app\n')
    assert.equal(await sh('cd /app; readlink shortcut; cat moved; ls -d doomed doomed.d 2>/dev/null; stat -c %a made/deep other'), 'one\nchained\n750\n750\n')
    // The last USER and WORKDIR are those of sandboxes.
    assert.equal(await sh('whoami; pwd; cat last.txt; sudo whoami'), 'user\n/home/user/work\nlast\nroot\n')
    assert.equal(await sh('curl -s http://127.0.0.1:8123/moved'), 'chained\n')
    assert.equal(await sh('find /app /opt -name ignored.log'), '')
    // What a sandbox does is its own.
    await box.files.write('/app/renamed.txt', 'changed')
    const other = await create('everything:default')
    assert.equal(await other.files.read('/app/renamed.txt'), 'one\n')
    assert.equal((await server.api('GET', '/v2/sandboxes?template=everything')).json.length, 2)
  })

  test('build of the same again takes every layer from the cache, and uploads nothing', async () => {
    const again = await build(definition(), 'everything')
    assert.notEqual(again.buildId, first.buildId)
    assert.equal(again.templateId, first.templateId)
    const steps = again.lines.filter((l) => /\[builder \d+\/\d+\] (COPY|RUN|ENV|WORKDIR|USER) /.test(l.message))
    assert.ok(steps.length >= 20, again.log)
    for (const l of steps) assert.match(l.message, /^CACHED \[builder \d+\/\d+\]/)
    assert.match(again.log, /Skipping upload of 'src', already cached/)
    assert.doesNotMatch(again.log, /Uploaded/)
  })

  test('build of one changed step runs it alone, and a forced one all that follow', async () => {
    const changed = await build(definition('other'), 'everything')
    const ran = (lines) => lines.filter((l) => /^\[builder \d+\/\d+\] (COPY|RUN|ENV|WORKDIR|USER) /.test(l.message)).map((l) => l.message)
    assert.equal(ran(changed.lines).length, 1, changed.log)
    assert.match(ran(changed.lines)[0], /echo other/)
    const box = await create('everything')
    assert.equal((await box.commands.run('cat last.txt')).stdout, 'other\n')

    const forced = await build(Template().fromTemplate('base').runCmd('echo 1').skipCache().runCmd('echo 2').runCmd('echo 3'), 'forced')
    const forcedAgain = await build(Template().fromTemplate('base').runCmd('echo 1').skipCache().runCmd('echo 2').runCmd('echo 3'), 'forced')
    assert.equal(ran(forced.lines).length, 3)
    assert.equal(ran(forcedAgain.lines).length, 2)
  })

  test('a failing step tells its last lines, its number and the caller, and the next build goes on after the last good step', async () => {
    const broken = (cmd) => Template().fromTemplate('base').runCmd('echo good >/tmp/good').runCmd(cmd)
    const err = await failure(broken('echo before; echo wrong >&2; exit 3'), 'broken')
    assert.match(err.message, /exit(ed with)?( status)? 3|exit code 3/)
    assert.match(err.stack, /template\.test\.mjs/)
    const t = (await server.api('GET', '/templates')).json.find((t) => t.aliases[0] === 'broken')
    assert.equal(t.buildStatus, 'error')
    const detail = (await server.api('GET', `/templates/${t.templateID}`)).json
    const status = await Template.getBuildStatus({ templateId: t.templateID, buildId: detail.builds[0].buildID })
    assert.deepEqual([status.status, status.reason.step], ['error', '2'])
    assert.match(status.reason.logEntries.map((l) => l.message).join('\n'), /wrong/)
    await assert.rejects(create('broken'))
    assert.equal(await Template.exists('broken:default'), false)

    const mended = await build(broken('cat /tmp/good'), 'broken')
    assert.match(mended.log, /CACHED \[builder 1\/2\]/)
    assert.match(mended.log, /\[builder 2\/2\] \[stdout\]: good/)
    assert.equal((await (await create('broken')).commands.run('cat /tmp/good')).stdout, 'good\n')
  })

  test('what cannot be built says why', async () => {
    const base = () => Template().fromTemplate('base')
    for (const [template, want] of [
      [base().runCmd('whoami', { user: 'root123' }), /^failed to run command 'whoami': command failed: unauthenticated: invalid username: 'root123'$/],
      [Template().fromTemplate('no-such-template'), /no-such-template/],
      [base().setStartCmd('sleep 1; exit 7', waitForFile('/never')), /7/],
    ]) {
      assert.match((await failure(template, 'impossible')).message, want)
    }
    assert.throws(() => base().copy('../outside', '.'), /outside/)
  })

  test('ready commands of each kind hold a build until the start command is ready', async () => {
    const start = 'sleep 2; touch /tmp/ready; exec python3 -m http.server 8124'
    const kinds = { port: waitForPort(8124), url: waitForURL('http://127.0.0.1:8124/'), process: waitForProcess('python3'), file: waitForFile('/tmp/ready'), timeout: waitForTimeout(3000) }
    await Promise.all(Object.entries(kinds).map(([kind, ready]) => build(Template().fromTemplate('base').setStartCmd(start, ready), `ready-${kind}`)))
    const box = await create('ready-url')
    assert.match((await box.commands.run('curl -sI http://127.0.0.1:8124/')).stdout, /200/)
  })

  test('a build in the background is building at once, and a new one cancels it', async () => {
    const slow = await Template.buildInBackground(Template().fromTemplate('base').skipCache().runCmd('sleep 300'), 'slow')
    const status = await Template.getBuildStatus(slow)
    assert.deepEqual([status.status, status.buildID, status.templateID], ['building', slow.buildId, slow.templateId])
    const quick = await build(Template().fromBaseImage().runCmd('true'), 'slow')
    const ended = await eventually('the end of the first', async () => {
      const s = await Template.getBuildStatus(slow)
      return s.status === 'error' && s
    })
    assert.match(ended.reason.message, /cancel/i)
    assert.equal((await Template.getBuildStatus({ templateId: quick.templateId, buildId: quick.buildId })).status, 'ready')
    // A build is started once.
    const twice = await server.api('POST', `/v2/templates/${quick.templateId}/builds/${quick.buildId}`, { fromTemplate: 'base', steps: [] })
    assert.deepEqual([twice.status, twice.json.code], [400, 400])
    assert.match(twice.json.message, /build is not in waiting state/)
  })

  test('tags name builds, and move', async () => {
    const v1 = await build(Template().fromTemplate('base').runCmd('echo 1 | sudo tee /version'), 'tagged:v1', { tags: ['stable'] })
    assert.deepEqual(v1.tags.sort(), ['stable', 'v1'])
    await build(Template().fromTemplate('base').runCmd('echo 2 | sudo tee /version'), 'tagged:v2')
    const version = async (name) => (await (await create(name)).files.read('/version')).trim()
    assert.equal(await version('tagged:v1'), '1')
    assert.equal(await version('tagged:v2'), '2')
    const assigned = await Template.assignTags('tagged:v2', ['stable', 'production'])
    assert.deepEqual(assigned.tags.sort(), ['production', 'stable'])
    assert.equal(await version('tagged:stable'), '2')
    const tags = await Template.getTags('tagged')
    assert.deepEqual(tags.map((t) => t.tag).sort(), ['production', 'stable', 'v1', 'v2'])
    assert.ok(tags.every((t) => t.createdAt instanceof Date))
    await Template.removeTags('tagged', 'stable')
    assert.equal(await Template.exists('tagged:stable'), false)
    assert.equal(await Template.exists('tagged:production'), true)
    await assert.rejects(create('tagged:stable'))
    await assert.rejects(Template.removeTags('tagged', 'default'), /default/)
    await assert.rejects(Template.removeTags('nonexistent', 'v1'))
    await assert.rejects(Template.assignTags('tagged:v1', ':invalid'))
    await assert.rejects(Template.assignTags('tagged:v1', 'tagged:'))
    await assert.rejects(Template.assignTags('tagged:nope', 'x'), e2b.TemplateError)
    await assert.rejects(Template.getTags('nonexistent'))
    // A template that is built on a tag of another one.
    const onTop = Template().fromTemplate('tagged:v1').runCmd('cat /version >/tmp/below')
    await build(onTop.runCmd('git init -q --bare /tmp/repository').gitClone('/tmp/repository', '/home/user/clone').pipInstall(['six']), 'on-top')
    const box = await create('on-top')
    assert.equal(await box.files.read('/tmp/below'), '1\n')
    assert.equal((await box.commands.run('git -C clone remote get-url origin')).stdout, '/tmp/repository\n')
  })

  test('files are uploaded where a signature lets them, whole and once', async () => {
    const t = (await server.api('POST', '/v3/templates', { name: 'uploads' })).json
    const hash = 'ab'.repeat(32)
    const link = (await server.api('GET', `/templates/${t.templateID}/files/${hash}`)).json
    assert.equal(link.present, false)
    const put = (url, body, headers) => fetch(url, { method: 'PUT', body, headers }).then(async (r) => ({ status: r.status, text: await r.text() }))
    const other = new URL(link.url)
    other.searchParams.set('expires', String(Number(other.searchParams.get('expires')) + 1))
    for (const url of [other.href, link.url.replace(hash, 'cd'.repeat(32)), link.url.split('?')[0], link.url.replace(t.templateID, 'x'.repeat(20))]) {
      assert.equal((await put(url, 'x')).status, 403, url)
    }
    assert.equal((await server.api('GET', `/templates/${t.templateID}/files/${hash}`)).json.present, false)
    assert.equal((await server.api('GET', `/templates/${t.templateID}/files/nothex`)).status, 400)
    assert.equal((await server.api('GET', `/templates/aaaaaaaaaaaaaaaaaaaa/files/${hash}`)).status, 404)
  })

  test('lists, details and logs', async () => {
    const list = (await server.api('GET', '/templates')).json
    const everything = list.find((t) => t.templateID === first.templateId)
    assert.deepEqual([everything.aliases, everything.buildStatus, everything.public, everything.envdVersion], [['everything'], 'ready', false, '0.6.13'])
    assert.ok(everything.spawnCount >= 3 && everything.buildCount === 3 && everything.lastSpawnedAt)
    const pages = []
    for (let next = ''; ; ) {
      const page = await server.api('GET', `/v2/templates?limit=2&nextToken=${next}`)
      pages.push(...page.json)
      next = page.headers.get('x-next-token')
      if (!next) break
    }
    assert.deepEqual(pages.map((t) => t.templateID), list.map((t) => t.templateID))
    const detail = (await server.api('GET', `/templates/${first.templateId}`)).json
    assert.equal(detail.builds.length, 3)
    assert.ok(detail.builds.every((b) => b.status === 'ready' && b.finishedAt))
    const logs = async (query) => (await server.api('GET', `/templates/${first.templateId}/builds/${first.buildId}/logs?${query}`)).json.logs
    const forward = await logs('limit=5')
    assert.equal(forward.length, 5)
    assert.deepEqual((await logs(`direction=backward&limit=1&cursor=${Date.parse(forward[4].timestamp) + 1}`)).length, 1)
    const status = async (query) => (await server.api('GET', `/templates/${first.templateId}/builds/${first.buildId}/status?${query}`)).json.logEntries
    assert.ok((await status('level=warn')).every((l) => ['warn', 'error'].includes(l.level)))
    assert.deepEqual((await status('logsOffset=2&limit=1')).map((l) => l.message), [forward[2].message])
    assert.equal((await server.api('GET', `/templates/${first.templateId}/builds/00000000-0000-4000-8000-000000000000/status`)).status, 400)
    for (const [method, path, want] of [
      ['POST', '/templates', 410], ['GET', '/templates/aliases/no-such', 404], ['GET', '/templates/aliases/base', 200],
      ['GET', '/templates/aaaaaaaaaaaaaaaaaaaa', 404], ['DELETE', '/templates/aaaaaaaaaaaaaaaaaaaa', 404], ['DELETE', '/templates/base', 404],
    ]) {
      const r = await server.api(method, path, method === 'GET' ? undefined : {})
      assert.deepEqual([r.status, r.json?.code], [want, want === 200 ? undefined : want], `${method} ${path}: ${r.text}`)
    }
    for (const body of [{}, { name: 'UPPER/x y' }, { name: 'other-team/x' }, { name: 'base' }, { name: 'x', cpuCount: 3 }, { name: 'x', cpuCount: 0 }, { name: 'x', memoryMB: 127 }, { name: 'x', tags: ['a b'] }, { name: 'x', surprise: 1 }]) {
      const r = await server.api('POST', '/v3/templates', body)
      assert.equal(r.status, 400, JSON.stringify(body) + r.text)
    }
  })

  test('a template in use stays, and is gone after its sandboxes', async () => {
    const box = await create('forced')
    const t = (await server.api('GET', '/templates')).json.find((t) => t.aliases[0] === 'forced')
    assert.equal((await server.api('DELETE', `/templates/${t.templateID}`)).status, 400)
    await box.kill()
    assert.equal((await server.api('DELETE', '/templates/forced')).status, 204)
    assert.equal(await Template.exists('forced'), false)
    await assert.rejects(create('forced'), (err) => /forced/.test(err.message))
  })
})

describe('images of a registry', { skip: !registry && 'no REGISTRY' }, () => {
  test('a Dockerfile on a small image without bash', async () => {
    const t = Template({ fileContextPath: context }).fromDockerfile(`FROM ${registry}/tiny:latest
ARG VERSION=1.2
ENV COLOR=green
WORKDIR /srv
COPY one.txt run.sh ./
RUN ./run.sh >ran && echo $COLOR $VERSION >>ran
CMD ["sleep", "1000"]
`)
    await build(t, 'from-dockerfile')
    const box = await create('from-dockerfile')
    assert.equal(await box.files.read('/srv/ran'), 'ran\ngreen 1.2\n')
    assert.equal((await box.commands.run('id -un; echo $FROM_IMAGE')).stdout, 'user\nyes\n')
  })

  test('a private image with a login, and an image without a shell', async () => {
    const wrong = Template().fromImage(`${privateRegistry}/private:latest`, { username: 'reader', password: 'wrong-password-1' })
    const err = await failure(wrong, 'private')
    assert.doesNotMatch(err.message + err.stack, /wrong-password-1/)
    const right = await build(Template().fromImage(`${privateRegistry}/private:latest`, { username: 'reader', password: 'right-password-1' }), 'private')
    assert.doesNotMatch(right.log, /right-password-1/)
    assert.ok(!server.log().includes('right-password-1'))
    await build(Template().fromImage(`${registry}/distroless:latest`), 'distroless')
    const box = await create('distroless')
    assert.equal(await box.isRunning(), true)
    await box.files.write('/tmp/x', 'written')
    assert.equal(await box.files.read('/tmp/x'), 'written')
  })

  test('a name of Docker Hub comes from the mirror', async () => {
    await build(Template().fromImage('tiny'), 'from-hub')
    assert.match((await failure(Template().fromImage(`${registry}/no-such:1`), 'from-hub')).message, /no-such/)
  })
})
