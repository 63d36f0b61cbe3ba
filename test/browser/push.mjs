// Tests push messages in a real browser:
//
//   node push.mjs BASE_URL SETUP_LINK OUT_DIR DEEDS_URL
//
// Chromium has no push service to talk to here. So the subscription is one of this
// script, which is the push service: it decrypts what the server sends with http_ece,
// and hands that to the page's real service worker (CDP, ServiceWorker.deliverPushMessage).
import { base, check, complaints, fill, finish, link, name, open, out, password, rest } from './kit.mjs'
import { createECDH, randomBytes } from 'node:crypto'
import { createServer } from 'node:http'
import { join } from 'node:path'
import ece from 'http_ece'

const deed = async (what) => (await (await fetch(`${rest[0]}/${what}`)).text()).split(' ')

// A push service with one browser.
const key = createECDH('prime256v1')
key.generateKeys()
const secret = randomBytes(16)
const got = []
const service = createServer((req, res) => {
  const parts = []
  req.on('data', (b) => parts.push(b))
  req.on('end', () => {
    const plain = ece.decrypt(Buffer.concat(parts), { version: 'aes128gcm', privateKey: key, authSecret: secret.toString('base64url') })
    got.push({ headers: req.headers, text: plain.toString() })
    res.writeHead(201).end()
  })
})
await new Promise((done) => service.listen(0, '127.0.0.1', done))

async function run() {
  const context = await open({ javaScriptEnabled: true })
  await context.grantPermissions(['notifications'], { origin: new URL(base).origin })
  const page = await context.newPage()
  await page.goto(link)
  await fill(page, { Name: name, Password: password, 'Repeat password': password })
  await page.getByRole('button', { name: 'Create account', exact: true }).click()
  await deed('room')
  const at = new URL('/console/account/notifications', base).href
  await page.goto(at)

  // What the browser would get from its push service comes from here; all else is real.
  await page.evaluate(([endpoint, p256dh, auth]) => {
    PushManager.prototype.subscribe = async function (options) {
      if (!options.userVisibleOnly || options.applicationServerKey.length !== 65) throw new Error('wrong options')
      return { toJSON: () => ({ endpoint, keys: { p256dh, auth } }) }
    }
  }, [`http://127.0.0.1:${service.address().port}/push/1`, key.getPublicKey().toString('base64url'), secret.toString('base64url')])
  const cdp = await context.newCDPSession(page)
  const registrations = []
  cdp.on('ServiceWorker.workerRegistrationUpdated', (e) => registrations.push(...e.registrations))
  await cdp.send('ServiceWorker.enable')
  await Promise.all([page.waitForNavigation(), page.getByRole('button', { name: 'Turn on here' }).click()])
  check('the browser is listed', /Push messages over 127\.0\.0\.1/.test(await page.locator('main').innerText()), await page.locator('main').innerText())
  const scope = await page.evaluate(async () => (await navigator.serviceWorker.ready).scope)
  check('the worker has the console and nothing else', new URL(scope).pathname === '/console/', scope)

  const [id] = await deed('propose')
  check('the push service got one message', got.length === 1, got.length)
  const m = JSON.parse(got[0].text)
  check('it says no more than that something waits', m.body === '1 action waits' && m.title === 'Postern' && m.url === `/console/actions/${id}`, got[0].text)
  check('it is signed', /^vapid t=.+, k=.+$/.test(got[0].headers.authorization), got[0].headers.authorization)

  const registration = registrations.find((r) => r.scopeURL === scope)
  // A notification takes the place of the last with its tag, and only its time tells them
  // apart. None is closed: a close is late now and then, and ends the next one. Chromium does
  // not say whether it delivered a message; on a busy machine it sometimes has not.
  const list = () => page.evaluate(async () => (await (await navigator.serviceWorker.ready).getNotifications()).map((n) => ({ title: n.title, body: n.body, tag: n.tag, at: n.timestamp, data: n.data, actions: n.actions })))
  let newest = 0
  const deliver = async (data) => {
    for (let tries = 0; tries < 4; tries++) {
      await cdp.send('ServiceWorker.deliverPushMessage', { origin: new URL(base).origin, registrationId: registration.registrationId, data })
      for (let i = 0; i < 100; i++) {
        const fresh = (await list()).filter((n) => n.at > newest)
        if (fresh.length) {
          newest = Math.max(...fresh.map((n) => n.at))
          return fresh
        }
        await page.waitForTimeout(50)
      }
    }
    return []
  }
  const shown = await deliver(got[0].text)
  check('the worker shows it', shown.length === 1 && shown[0].body === '1 action waits' && shown[0].data.url === `/console/actions/${id}`, JSON.stringify(shown))
  check('it has no buttons', (shown[0].actions || []).length === 0)

  // A click opens the action, and nothing else.
  const worker = context.serviceWorkers()[0]
  const opened = await worker.evaluate(async () => {
    const places = []
    Object.defineProperty(self.clients, 'openWindow', { value: async (url) => { places.push(url) }, configurable: true })
    let closed = 0
    const [notification] = await self.registration.getNotifications()
    Object.defineProperty(notification, 'close', { value: () => { closed++ } }) // see list
    const event = new NotificationEvent('notificationclick', { notification })
    self.dispatchEvent(event)
    await new Promise((done) => setTimeout(done, 500))
    return [closed, ...places]
  })
  check('a click closes it and opens the action', opened.length === 2 && opened[0] === 1 && opened[1] === `/console/actions/${id}`, opened)

  // Attacks: messages that lead elsewhere, or that try to decide.
  const left = []
  context.on('request', (r) => left.push(`${r.method()} ${r.url()}`))
  for (const evil of [
    `{"title":"x","body":"x","url":"/console/actions/${id}/decision"}`, '{"url":"https://evil.example/"}', '{"url":"//evil.example/console/review"}',
    '{"url":"/console/review?decision=approve"}', '{"url":"javascript:alert(1)"}', `{"url":"/console/actions/${id}","actions":[{"action":"approve","title":"Approve"}],"decision":"approve"}`,
    'no JSON', '', 'null', '{"title":{},"body":[1]}',
  ]) {
    const now = await deliver(evil)
    const n = now[0] || {}
    check(`shown, and leads only here: ${evil.slice(0, 60)}`, now.length === 1 && [`/console/actions/${id}`, '/console/review'].includes(n.data?.url) && !(n.actions || []).length && n.title !== '', JSON.stringify(now))
  }
  check('no message made a request', left.filter((l) => !/icon-192\.png/.test(l)).length === 0, left)
  const [, state] = await deed('state')
  check('nothing was decided', state === 'pending', state)

  for (const [size, viewport] of [['wide', { width: 1440, height: 900 }], ['narrow', { width: 390, height: 844 }]]) {
    for (const scheme of ['light', 'dark']) {
      await page.setViewportSize(viewport)
      await page.emulateMedia({ colorScheme: scheme, reducedMotion: 'reduce' })
      await page.goto(at)
      await page.screenshot({ path: join(out, `notifications-${size}-${scheme}.png`), fullPage: true })
      const over = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth)
      check(`it fits the screen, ${size} ${scheme}`, over <= 0, over)
    }
  }
  // Whoever uses this browser next sees no message of the last person.
  await page.setViewportSize({ width: 1440, height: 900 })
  await page.locator('form[action="/console/signout"] button').click()
  await page.waitForURL('**/console/signin')
  let workers = 1
  for (let i = 0; i < 100 && workers > 0; i++) {
    workers = await page.evaluate(async () => (await navigator.serviceWorker.getRegistrations()).length)
    if (workers > 0) await page.waitForTimeout(50)
  }
  check('signing out ends push messages here', workers === 0, workers)
  check('the browser complains of nothing', complaints.length === 0, complaints)
}

await finish(run)
service.close()
