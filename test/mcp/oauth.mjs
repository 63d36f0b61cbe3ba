// Connects the official client of the Model Context Protocol by OAuth, unchanged, with a
// person who answers in a real browser:
//
//   node oauth.mjs
//
// The environment has URL (of the tools), LINK (the console's set-up link), INBOX_KEY and
// INBOX (an inbox that exists), and OUT, where screenshots of the consent page go. It
// prints what the client got as its last line, and exits with status 0 if all passed.
import assert from 'node:assert/strict'
import { createServer } from 'node:http'
import { mkdirSync } from 'node:fs'
import { join } from 'node:path'
import { Client } from '@modelcontextprotocol/sdk/client/index.js'
import { StreamableHTTPClientTransport } from '@modelcontextprotocol/sdk/client/streamableHttp.js'
import { UnauthorizedError } from '@modelcontextprotocol/sdk/client/auth.js'
import { chromium } from '../browser/node_modules/playwright-core/index.mjs'

const { URL: url, LINK, INBOX, INBOX_KEY, OUT } = process.env
mkdirSync(OUT, { recursive: true })
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM || '/usr/bin/chromium', headless: true, args: ['--no-sandbox', '--disable-gpu'] })
const context = await browser.newContext({ javaScriptEnabled: false, viewport: { width: 1280, height: 900 } })
const page = await context.newPage()

// A desktop program: it waits at a port of this computer for the browser to come back.
let arrived
const listener = createServer((req, res) => {
  const q = new URL(req.url, 'http://127.0.0.1').searchParams
  res.end('You can close this page.')
  if (q.has('code') || q.has('error')) arrived?.(q)
})
await new Promise((done) => listener.listen(0, '127.0.0.1', done))

// A provider keeps what the client gets, as the SDK asks of programs.
class Provider {
  redirectUrl = `http://127.0.0.1:${listener.address().port}/callback`
  clientMetadata = { client_name: 'A desktop program', redirect_uris: [this.redirectUrl], grant_types: ['authorization_code', 'refresh_token'], response_types: ['code'], token_endpoint_auth_method: 'none' }
  clientInformation() { return this.info }
  saveClientInformation(info) { this.info = info }
  tokens() { return this.kept }
  saveTokens(tokens) { this.kept = tokens }
  redirectToAuthorization(to) { this.at = to }
  saveCodeVerifier(v) { this.verifier = v }
  codeVerifier() { return this.verifier }
  invalidateCredentials(what) { if (what !== 'verifier') this.kept = undefined; if (what === 'all' || what === 'client') this.info = undefined }
  state() { return 'state-of-the-program' }
}

// connect is what every program does: try, send the person to the page, finish.
async function connect(provider, consent) {
  const transport = new StreamableHTTPClientTransport(new URL(url), { authProvider: provider })
  try {
    await new Client({ name: 'desktop', version: '1' }).connect(transport)
    assert.fail('it connects without a key')
  } catch (err) {
    assert.ok(err instanceof UnauthorizedError, String(err))
  }
  const back = new Promise((done) => { arrived = done })
  await page.goto(provider.at.href)
  await consent()
  const q = await back
  await page.waitForURL((u) => u.pathname === '/callback') // loaded, or the next page interrupts it
  assert.equal(q.get('state'), 'state-of-the-program')
  assert.equal(q.get('iss'), new URL(url).origin)
  if (q.has('error')) return q.get('error')
  await transport.finishAuth(q.get('code'))
  return again(provider)
}

async function again(provider) {
  const client = new Client({ name: 'desktop', version: '1' })
  await client.connect(new StreamableHTTPClientTransport(new URL(url), { authProvider: provider }))
  return client
}

const tools = async (client) => (await client.listTools()).tools.map((t) => t.name)
const call = async (client, name, args) => client.callTool({ name, arguments: args })

await page.goto(LINK)
for (const [label, value] of Object.entries({ Name: 'ann', Password: 'correct horse battery staple', 'Repeat password': 'correct horse battery staple' })) await page.getByLabel(label, { exact: true }).fill(value)
await page.getByRole('button').first().click()
await page.waitForURL((u) => u.pathname !== new URL(LINK).pathname)

// The person refuses, and the program hears of it.
const first = new Provider()
assert.equal(await connect(first, () => page.getByRole('button', { name: 'Refuse' }).click()), 'access_denied')

// The person lets it read and send in an inbox that exists.
const provider = new Provider()
const client = await connect(provider, async () => {
  for (const [name, viewport, colorScheme] of [['wide-light', { width: 1280, height: 900 }, 'light'], ['wide-dark', { width: 1280, height: 900 }, 'dark'], ['narrow-light', { width: 360, height: 800 }, 'light'], ['narrow-dark', { width: 360, height: 800 }, 'dark']]) {
    await page.setViewportSize(viewport)
    await page.emulateMedia({ colorScheme, reducedMotion: 'reduce' })
    await page.screenshot({ path: join(OUT, `connect-${name}.png`), fullPage: true })
    assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= window.innerWidth), `the page is wider than the screen: ${name}`)
  }
  await page.setViewportSize({ width: 1280, height: 900 })
  assert.match(await page.locator('main').innerText(), /“A desktop program”\s+not verified[\s\S]*this computer \(127\.0\.0\.1\)/)
  await page.getByLabel(/^draft/).uncheck()
  await page.getByLabel('Inbox', { exact: true }).selectOption({ label: INBOX })
  await page.getByLabel(/^Key of the existing inbox/).fill(INBOX_KEY)
  await page.getByRole('button', { name: 'Allow' }).click()
})
assert.equal(provider.kept.scope, 'read send')
assert.ok((await tools(client)).includes('email_send'))
assert.ok(!(await call(client, 'email_inbox', {})).isError)
const sent = await call(client, 'email_send', { to: ['bob@example.com'], subject: 'By OAuth', body: 'Hello' })
assert.equal(sent.structuredContent.status, 'pending_approval')
assert.ok((await call(client, 'email_draft_create', { to: ['bob@example.com'], subject: 's', body: 'b' })).isError, 'it writes drafts without the scope')

// Its access token ends; the SDK renews it without a person.
const before = provider.kept
provider.kept = { ...before, access_token: 'pat_AAAAAAAAAAAAAAAAAAAAAAAAAA' }
const renewed = await again(provider)
assert.ok((await tools(renewed)).length > 5)
assert.notEqual(provider.kept.refresh_token, before.refresh_token)

// The person disconnects it in the console: it must connect again.
await page.goto(new URL('/console/apps', url).href)
await page.screenshot({ path: join(OUT, 'apps.png'), fullPage: true })
await page.getByRole('button', { name: /Disconnect/ }).click()
await page.locator('main', { hasText: 'No connected apps' }).waitFor()
provider.at = undefined
await assert.rejects(call(renewed, 'email_inbox', {}), UnauthorizedError)
assert.ok(provider.at, 'it is not led to the consent page again')

await browser.close()
listener.close()
console.log('connected, sent, renewed and disconnected')
process.exit(0)
