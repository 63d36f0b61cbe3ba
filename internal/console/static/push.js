// Turns push messages on in this browser: it registers the service worker, asks the
// browser for a subscription, and sends that with the form. Everything else on the
// page works without a script.
'use strict'
{
  const form = document.getElementById('device-form')
  const button = document.getElementById('push-on')
  const problem = document.getElementById('push-problem')
  const say = (text) => {
    problem.textContent = text
    problem.hidden = text === ''
  }
  const bytes = (s) => Uint8Array.from(atob(s.replace(/-/g, '+').replace(/_/g, '/')), (c) => c.charCodeAt(0))
  const on = async () => {
    say('')
    button.disabled = true
    try {
      if (await Notification.requestPermission() !== 'granted') {
        throw new Error('it does not allow notifications from this site; allow them in its settings')
      }
      await navigator.serviceWorker.register('/console/sw.js')
      const worker = await navigator.serviceWorker.ready
      const old = await worker.pushManager.getSubscription()
      if (old) await old.unsubscribe() // another key, or another person
      const sub = await worker.pushManager.subscribe({ userVisibleOnly: true, applicationServerKey: bytes(form.dataset.key) })
      const { endpoint, keys } = sub.toJSON()
      form.elements.endpoint.value = endpoint
      form.elements.p256dh.value = keys.p256dh
      form.elements.auth.value = keys.auth
      form.submit()
    } catch (e) {
      button.disabled = false
      say(`The browser could not turn them on: ${e.message}.`)
    }
  }
  if (!('serviceWorker' in navigator) || !('PushManager' in window) || !('Notification' in window)) {
    say('This browser has no push messages here. They need HTTPS; on an iPhone or iPad, add the console to the home screen first.')
  } else {
    form.hidden = false
    button.addEventListener('click', on)
  }
}
