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
      say(e.name === 'InvalidStateError' ? 'This device already has a passkey for your account.'
        : e.name === 'NotAllowedError' ? 'No passkey was used: the request was cancelled or timed out, or no passkey is available.'
          : `The browser reported an error: ${e.message}`)
    }
  }
  if (!window.PublicKeyCredential || !PublicKeyCredential.parseRequestOptionsFromJSON) {
    say('This browser does not support passkeys here. Use a password and code, or a newer browser.')
  } else {
    button.hidden = false
    button.addEventListener('click', ask)
    button.focus()
  }
}
