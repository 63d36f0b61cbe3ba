// Tests sign-in and accounts in a real browser, mostly without JavaScript:
//
//   node people.mjs BASE_URL SETUP_LINK OUT_DIR
//
// BASE_URL must contain a host name (http://localhost:PORT): WebAuthn does not allow
// IP addresses. The test creates the console's first account, sets up an
// authenticator app and signs in with it, creates a passkey on a virtual
// authenticator, and uses it to sign in and as a second factor. It invites a person,
// changes their role and disables them. It saves screenshots of every page, wide and
// narrow, light and dark, in OUT_DIR. It prints a line for each check and exits with
// status 0 if all passed.
import { base, check, complaints, fill, finish, foreign, link, name, open, out, password, pictures } from './kit.mjs'
import { createHmac } from 'node:crypto'
import { join } from 'node:path'

// code returns the code of an authenticator app (RFC 6238), some 30-second steps from now.
function code(secret, steps = 0) {
  const letters = 'ABCDEFGHIJKLMNOPQRSTUVWXYZ234567'
  const bits = [...secret.replaceAll(' ', '')].map((c) => letters.indexOf(c).toString(2).padStart(5, '0')).join('')
  const key = Buffer.from(bits.match(/.{8}/g).map((b) => parseInt(b, 2)))
  const counter = Buffer.alloc(8)
  counter.writeBigUInt64BE(BigInt(Math.floor(Date.now() / 30_000) + steps))
  const mac = createHmac('sha1', key).update(counter).digest()
  return String((mac.readUInt32BE(mac.at(-1) & 15) & 0x7fffffff) % 1_000_000).padStart(6, '0')
}

// picture takes a screenshot of the current page, for pages without a URL of their own.
async function picture(page, title) {
  for (const [size, scheme, viewport] of [['wide', 'light', { width: 1280, height: 900 }], ['narrow', 'dark', { width: 390, height: 844 }]]) {
    await page.setViewportSize(viewport)
    await page.emulateMedia({ colorScheme: scheme, reducedMotion: 'reduce' })
    await page.screenshot({ path: join(out, `${title}-${size}-${scheme}.png`), fullPage: true })
    const over = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth)
    check(`${title} fits the screen, ${size}`, over <= 0, over)
  }
  await page.setViewportSize({ width: 1280, height: 900 })
  await page.emulateMedia({ colorScheme: 'light' })
}

// authenticator adds a virtual authenticator to the page's browser (CDP, domain WebAuthn).
async function authenticator(page) {
  const cdp = await page.context().newCDPSession(page)
  await cdp.send('WebAuthn.enable')
  const { authenticatorId } = await cdp.send('WebAuthn.addVirtualAuthenticator', {
    options: { protocol: 'ctap2', transport: 'internal', hasResidentKey: true, hasUserVerification: true, isUserVerified: true, automaticPresenceSimulation: true },
  })
  return { verified: (is) => cdp.send('WebAuthn.setUserVerified', { authenticatorId, isUserVerified: is }) }
}

const path = (page) => new URL(page.url()).pathname
const alerted = (page) => page.getByRole('alert').first().innerText()
const click = (page, label) => page.getByRole('button', { name: label, exact: true }).click()
const signOut = (page) => click(page, 'Sign out')

async function run() {
  const plain = await (await open()).newPage()
  const go = (page, to) => page.goto(new URL(to, base).href)
  await plain.goto(link)
  check('the set-up link shows the role', /invited as owner/.test(await plain.locator('main').innerText()))
  await fill(plain, { Name: name, Password: password, 'Repeat password': password })
  await click(plain, 'Create account')

  // An authenticator app, without JavaScript.
  await go(plain, '/console/account')
  await plain.locator('#app-password').fill('not the password')
  await click(plain, 'Set up')
  check('setting up a second factor needs the password, not only a session', /wrong/.test(await alerted(plain)))
  await plain.locator('#app-password').fill(password)
  await click(plain, 'Set up')
  check('the QR code is inline SVG', await plain.locator('svg.qr path').isVisible())
  const secret = await plain.locator('code.copy').innerText()
  await picture(plain, 'app')
  await fill(plain, { Code: '000000' })
  await click(plain, 'Confirm')
  check('a wrong code is refused and keeps the same secret', (await plain.locator('code.copy').innerText()) === secret && /code is wrong/.test(await alerted(plain)))
  const used = code(secret)
  await fill(plain, { Code: used })
  await click(plain, 'Confirm')
  const codes = await plain.locator('.codes code').allInnerTexts()
  check('there are ten recovery codes', codes.length === 10 && new Set(codes).size === 10, codes.length)
  await picture(plain, 'codes')
  await go(plain, '/console/account')
  check('the app is set up', /Signing in requires a second factor/.test(await plain.locator('main').innerText()))
  await signOut(plain)

  await fill(plain, { Name: name, Password: password })
  await click(plain, 'Sign in')
  check('the password alone no longer signs in', await plain.getByRole('heading', { name: 'Second factor' }).isVisible())
  await go(plain, '/console/')
  check('a password without the code opens no page', path(plain) === '/console/signin', plain.url())
  await fill(plain, { Name: name, Password: password })
  await click(plain, 'Sign in')
  await plain.locator('#code').fill(used)
  await click(plain, 'Sign in')
  check('a code works only once', /already used/.test(await alerted(plain)))
  await picture(plain, 'second')
  await plain.locator('#code').fill(code(secret, 1))
  await click(plain, 'Sign in')
  check('the next code signs in', path(plain) === '/console/', plain.url())
  await go(plain, '/console/stepup?next=https://evil.example/console/')
  check('the second-factor page does not redirect to another host', (await plain.locator('#code-form input[name=next]').inputValue()) === '/console/')

  // A passkey, which needs a script.
  const context = await open({ javaScriptEnabled: true })
  const page = await context.newPage()
  const key = await authenticator(page)
  await go(page, '/console/signin?next=/console/account')
  await fill(page, { Name: name, Password: password })
  await click(page, 'Sign in')
  await page.locator('#code').fill(codes[0].toLowerCase())
  await click(page, 'Sign in')
  await page.waitForURL('**/console/account')
  check('a recovery code signs in and returns to the requested page', true)
  check('a used recovery code is removed', /9 recovery codes are left/.test(await page.locator('main').innerText()))
  await page.getByLabel('Name of the new passkey').fill('<b>laptop</b>')
  await click(page, 'Add a passkey')
  await picture(page, 'ask')
  await page.getByRole('button', { name: 'Create a passkey' }).click()
  await page.waitForURL('**/console/account')
  check('the new passkey is listed with its name, as text', await page.getByText('<b>laptop</b>').isVisible())
  await click(page, 'Add a passkey')
  await page.getByRole('button', { name: 'Create a passkey' }).click()
  await page.getByText('This device already has a passkey for your account').waitFor()
  check('one device cannot hold two passkeys of a person', true)
  await signOut(page)
  await page.waitForURL('**/console/signin')

  await click(page, 'Sign in with a passkey')
  await key.verified(false)
  await page.getByRole('button', { name: 'Use a passkey' }).click()
  await page.getByText('No passkey was used').waitFor()
  check('a passkey without user verification does not sign in', path(page) === '/console/signin/passkey/ask', page.url())
  await key.verified(true)
  await page.getByRole('button', { name: 'Use a passkey' }).click()
  await page.waitForURL((u) => u.pathname === '/console/')
  check('a passkey signs in without a name or a password', true)
  const state = await context.storageState()

  await go(page, '/console/stepup?next=/console/people')
  await click(page, 'Use a passkey')
  await page.getByRole('button', { name: 'Use a passkey' }).click()
  await page.waitForURL('**/console/people')
  check('a passkey works as a second factor and returns to the requested page', true)

  // Passkeys require JavaScript. Without it, the page must offer an alternative.
  const bare = await (await open()).newPage()
  await go(bare, '/console/signin')
  await click(bare, 'Sign in with a passkey')
  check('without JavaScript the passkey page shows the alternative', await bare.getByText('Passkeys require JavaScript').isVisible() && !(await bare.locator('#ask').isVisible()))

  // A person is invited as a reviewer, becomes a viewer, and is disabled.
  await page.getByLabel('reviewer can decide').check()
  await fill(page, { Email: 'rita@example.com' })
  await click(page, 'Create link')
  const invitation = await page.locator('#invitation').innerText()
  check('an invitation link has this console’s address', invitation.startsWith(new URL('/console/setup?token=', base).href), invitation)
  await picture(page, 'invited')
  const rita = await (await open()).newPage()
  await rita.goto(invitation)
  check('the invitation shows the role', /invited as reviewer/.test(await rita.locator('main').innerText()))
  await fill(rita, { Name: 'local-root', Password: password, 'Repeat password': password })
  await click(rita, 'Create account')
  check('the operator’s name cannot be taken', /local- are reserved/.test(await alerted(rita)))
  await fill(rita, { Name: 'rita', Password: password, 'Repeat password': password })
  await click(rita, 'Create account')
  check('a new account lands in the queue', path(rita) === '/console/', rita.url())
  check('a reviewer sees no link to the people page', await rita.getByRole('link', { name: 'People' }).count() === 0)
  check('a reviewer cannot open the people page', (await go(rita, '/console/people')).status() === 403)
  await pictures([['people', '/console/people'], ['person', '/console/people/rita'], ['account', '/console/account'], ['stepup', '/console/stepup']], state)

  await go(page, '/console/people/rita')
  await page.getByLabel('viewer can view').check()
  await click(page, 'Set role')
  await go(rita, '/console/')
  check('a change of role ends the person’s sessions', path(rita) === '/console/signin', rita.url())
  await fill(rita, { Name: 'rita', Password: password })
  await click(rita, 'Sign in')
  check('the console tells a viewer their role', await rita.getByText('view only').isVisible())
  await go(page, '/console/people/rita')
  await click(page, 'Disable')
  await go(rita, '/console/')
  check('disabling a person ends their sessions', path(rita) === '/console/signin', rita.url())
  await fill(rita, { Name: 'rita', Password: password })
  await click(rita, 'Sign in')
  check('a disabled person cannot sign in', /is wrong/.test(await alerted(rita)))
  await go(page, `/console/people/${name}`)
  await click(page, 'Disable')
  check('the last owner cannot be disabled', /needs an owner/.test(await alerted(page)))

  await go(plain, '/console/signin') // creating the passkey ended the earlier session
  await fill(plain, { Name: name, Password: password })
  await click(plain, 'Sign in')
  await plain.locator('#code').fill(codes[1])
  await click(plain, 'Sign in')
  await go(page, '/console/account')
  const before = await page.getByRole('button', { name: 'End', exact: true }).count()
  await page.getByRole('button', { name: 'End', exact: true }).first().click()
  check('a person can end another of their sessions', await page.getByRole('button', { name: 'End', exact: true }).count() === before - 1, before)
  await go(plain, '/console/account')
  check('an ended session opens no page', path(plain) === '/console/signin', plain.url())
  await pictures([['signin', '/console/signin']])
  check('the pages load nothing from another host', foreign.length === 0, foreign.join(' '))
  check('the browser logs no error', complaints.length === 0, complaints.join(' | '))
}

await finish(run)
