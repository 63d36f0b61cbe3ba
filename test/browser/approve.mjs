// Tests approval in a real browser without JavaScript:
//
//   node approve.mjs BASE_URL SETUP_LINK OUT_DIR
//
// The test creates the console's first account with the one-time link, signs out
// and in, opens a pending action, approves it with the keyboard alone and waits
// until it is done. It saves screenshots of every page, wide and narrow, light and
// dark, in OUT_DIR. It prints a line for each check and exits with status 0 if all
// passed. If several actions are pending, it takes the first with a hidden recipient
// and a file.
import { base, check, complaints, fill, finish, foreign, link, name, open, out, password, pictures, tabTo } from './kit.mjs'
import { join } from 'node:path'

async function run() {
  // Opening the link must not use it up: mail scanners and previews fetch links.
  await pictures([['setup', link], ['signin', '/console/signin']])
  const context = await open()
  const page = await context.newPage()
  await page.goto(link)
  check('the set-up link shows a form and is not used up by opening it', await page.getByRole('heading', { name: 'Create your account' }).isVisible())
  await fill(page, { Name: name, Password: password, 'Repeat password': password })
  await page.getByRole('button', { name: 'Create account' }).click()
  check('a new account lands in the queue', new URL(page.url()).pathname === '/console/' && await page.getByRole('heading', { level: 1 }).isVisible(), page.url())
  const again = await page.goto(link)
  check('the set-up link works only once', again.status() === 410, again.status())

  await page.goto(new URL('/console/review', base).href)
  await page.getByRole('button', { name: 'Sign out' }).click()
  check('signing out leads to the sign-in page', new URL(page.url()).pathname === '/console/signin', page.url())
  await page.goto(new URL('/console/audit', base).href)
  check('a page without a session redirects to the sign-in page', page.url().includes('/console/signin?next='), page.url())
  await fill(page, { Name: name, Password: 'not the password' })
  await page.getByRole('button', { name: 'Sign in' }).click()
  check('a wrong password is refused', await page.getByRole('alert').isVisible())
  await fill(page, { Name: name, Password: password })
  await page.keyboard.press('Enter')
  await page.waitForURL('**/console/audit')
  check('signing in returns to the requested page', true)
  const state = await context.storageState()
  const cookie = state.cookies.find((c) => c.name === 'postern_session')
  check('the session cookie is HttpOnly, SameSite=Strict and limited to /console', cookie?.httpOnly && cookie.sameSite === 'Strict' && cookie.path === '/console', JSON.stringify({ ...cookie, value: '' }))

  // The queue, and in it the action to approve.
  await page.goto(new URL('/console/review', base).href)
  const rows = page.locator('.queue-list section:not([aria-labelledby=unknown]) .row') // the others want another answer
  const count = await rows.count()
  if (!check('the queue has a pending action', count > 0, 'the queue is empty')) return
  let row = rows.first()
  for (let i = 0; i < count; i++) {
    const text = await rows.nth(i).innerText()
    if (/\d hidden/.test(text) && /\d files?/.test(text)) {
      row = rows.nth(i)
      break
    }
  }
  const [to, title] = [await row.locator('.who').boundingBox(), await row.locator('.what').boundingBox()]
  check('the queue shows the recipient before the subject', to.y < title.y)
  const inQueue = Number(/(\d+) hidden/.exec(await row.innerText())?.[1])
  check('the queue shows how many recipients are hidden', inQueue > 0, await row.innerText())
  await row.click()
  const action = page.url()
  check('the queue links to the action\'s page', /\/console\/actions\/act_[A-Z2-7]{26}$/.test(action), action)

  const visible = async (what, locator) => check(`${what} is visible`, (await locator.count()) > 0 && await locator.first().isVisible())
  await visible('who receives it', page.locator('.people .addr'))
  await visible('who receives it hidden', page.locator('.people .hid .addr, .people .alike .addr'))
  check('the page marks each hidden recipient', (await page.locator('.people .say', { hasText: 'hidden from the others' }).count()) === inQueue)
  await visible('the text', page.locator('pre.text'))
  await visible('the name of the file', page.locator('#s-files ~ .atts b'))
  check('the full SHA-256 digest of the file is shown', /^[0-9a-f]{64}$/.test(await page.locator('.atts .digest').first().innerText()))
  check('the full digest of the action is shown', /^[0-9a-f]{64}$/.test(await page.locator('#digest').textContent()))
  const path = new URL(action).pathname
  await pictures([['queue', '/console/review'], ['action', path], ['decided-before', '/console/decided']], state)

  // With the keyboard alone, from the top of the page.
  const late = await context.newPage() // somebody else, who looks at the same
  await late.goto(action)
  await page.bringToFront()
  await page.goto(action)
  await page.keyboard.press('Tab')
  check('the first Tab stop is the skip link', (await page.evaluate(() => document.activeElement.textContent)) === 'Skip to the content')
  await page.keyboard.press('Enter')
  await page.waitForURL((u) => u.hash === '#main') // which is told a moment later
  check('the skip link jumps to the content', page.url().endsWith('#main'))
  const steps = await tabTo(page, 'approve')
  check('Tab reaches the approve button', steps > 0)
  const outline = await page.evaluate(() => getComputedStyle(document.activeElement).outlineStyle)
  check('the focused button has a visible outline', outline !== 'none', outline)
  await page.screenshot({ path: join(out, 'approve-focused.png') })
  const label = await page.locator('#approve').innerText()
  check('the button shows the number of recipients and of hidden recipients', /send to \d+, \d+ hidden/.test(label), label)
  await page.keyboard.press('Enter')
  await page.waitForURL((u) => u.searchParams.get('done') === path.split('/').pop())
  check('after the decision a line says what was done', /^Approved/.test((await page.locator('.flash').innerText()).trim()), await page.locator('.flash').innerText())
  await page.locator('.flash a').click()
  await page.waitForURL((u) => u.pathname === path)

  const now = () => page.locator('#standing [data-state]').getAttribute('data-state').catch(() => 'approved') // the page was looking again just now
  let got = await now()
  for (let i = 0; i < 240 && ['approved', 'executing'].includes(got); i++) {
    await page.waitForTimeout(500)
    got = await now()
  }
  check('the page reloads until it shows that the action is done', got === 'done', `${got}: ${await page.locator('main').innerText()}`)

  await late.locator('#approve').click()
  check('a second decision is refused and changes nothing', /changed nothing/.test(await late.getByRole('alert').innerText()) && await late.locator('[data-state=done]').isVisible())
  await late.close()

  const sandboxes = [['sandboxes', '/console/sandboxes']]
  await page.goto(new URL('/console/sandboxes', base).href)
  const one = page.locator('main table a[href^="/console/sandboxes/"]').first()
  if (await one.count()) sandboxes.push(['sandbox', await one.getAttribute('href')])
  await pictures([
    ['done', path], ['decided', '/console/decided'], ...sandboxes, ['inboxes', '/console/inboxes'], ['audit', '/console/audit'],
    ['verified', '/console/audit', async (p) => {
      await p.locator('button[form=verify-form]').click()
      await p.getByRole('heading', { name: 'The record is intact' }).waitFor()
    }],
    ['not-found', '/console/nothing'], ['link-used', link],
  ], state)
  await page.goto(new URL('/console/decided', base).href)
  check('the action is listed as decided', await page.locator(`a[href="${path}"]`).count() === 1)
  check('the pages load nothing from another host', foreign.length === 0, foreign.join(' '))
  check('the browser logs no error', complaints.length === 0, complaints.join(' | '))
}

await finish(run)
