// Has the browser ask for a passkey, and sends its answer with the form. This
// is the only thing in the console that needs a script: the page's other ways,
// a password and a code, do without.
'use strict'
{
  const form = document.getElementById('passkey')
  const button = document.getElementById('ask')
  const problem = document.getElementById('problem')
  document.getElementById('scriptless').hidden = true
  const say = (text) => {
    problem.textContent = text
    problem.parentElement.hidden = text === ''
  }
  const ask = async () => {
    say('')
    button.disabled = true
    try {
      const options = JSON.parse(form.dataset.options)
      const answer = form.dataset.kind === 'create'
        ? await navigator.credentials.create({ publicKey: PublicKeyCredential.parseCreationOptionsFromJSON(options) })
        : await navigator.credentials.get({ publicKey: PublicKeyCredential.parseRequestOptionsFromJSON(options) })
      form.elements.response.value = JSON.stringify(answer.toJSON())
      form.submit()
    } catch (e) {
      button.disabled = false
      say(e.name === 'InvalidStateError' ? 'There is a passkey of yours on that device already.'
        : e.name === 'NotAllowedError' ? 'No passkey was shown: it was cancelled, took too long, or there is none here.'
          : `The browser could not do this: ${e.message}`)
    }
  }
  if (!window.PublicKeyCredential || !PublicKeyCredential.parseRequestOptionsFromJSON) {
    say('This browser cannot use passkeys here. Take the other way, or a newer browser.')
  } else {
    button.hidden = false
    button.addEventListener('click', ask)
    button.focus()
  }
}
