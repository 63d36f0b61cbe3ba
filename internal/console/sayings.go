package console

import (
	"postern/internal/audit"
	"postern/internal/oversight"
)

// A saying is the sentence for an entry of the record, with its icon and tag.
//
// The text has places: {who} is the actor; {object} the object and {reason} the field
// "reason", as they are; {b:name} the same in bold, {q:reason} in quotation marks,
// {code:program} as code; {inbox:object}, {sandbox:object}, {person:object} and {as:to}
// name a principal; {action} is the action that the entry is about, {action!} the same
// without its agent; {run:object} links a run; {time:until}, {size:bytes}, {ms:ms} and
// {n:files:file:files} are formatted for people; {took} is the time since the proposal.
// Text in [ ] is left out if one of its places is empty.
type saying struct {
	icon string
	text string
	tag  string // a word beside it, or empty
	tone string // of the tag: warn, bad, good, accent, or empty
}

// sayings has one for every verb of the record. TestEveryVerbHasASentence checks that.
var sayings = map[audit.Verb]saying{
	audit.ActionPropose:  {"send", "{who} {ask} {action!}[ ({verdict})].", "", ""},
	audit.ActionRevise:   {"edit", "{who} changed {action}.", "changed", ""},
	audit.ActionAsk:      {"person", "A person is asked about {action}.", "held", "warn"},
	audit.ActionVote:     {"person", "{who} approved {action}, as one of several[, after {took}][: {q:reason}].", "approved", "accent"},
	audit.ActionApprove:  {"person", "{who} approved {action}[ after {took}][, and allowed {b:allowed}][: {q:reason}].", "approved", "accent"},
	audit.ActionLate:     {"clock", "{who} approved {action} too late, so a person is asked again.", "held", "warn"},
	audit.ActionReject:   {"person", "{who} rejected {action}[ after {took}][: {q:reason}].", "rejected", "bad"},
	audit.ActionExpire:   {"clock", "Nobody decided in time about {action}, so it was refused.", "expired", "bad"},
	audit.ActionStop:     {"stop", "A kill switch stopped {action}[: {q:reason}].", "stopped", "bad"},
	audit.ActionCancel:   {"x", "{who} cancelled {action}.", "cancelled", ""},
	audit.ActionComment:  {"edit", "{who} commented on {action}.", "", ""},
	audit.ActionExecute:  {"right", "{who} began to carry out {action}.", "", ""},
	audit.ActionDefer:    {"clock", "{action} was put off[: {q:result}].", "later", ""},
	audit.ActionRetry:    {"warn", "{action} had no effect and is tried again[: {q:result}].", "again", "warn"},
	audit.ActionDone:     {"check", "{action} was carried out[: {q:result}].", "done", "good"},
	audit.ActionFailed:   {"x", "{action} failed[: {q:result}].", "failed", "bad"},
	audit.ActionUnknown:  {"warn", "Nobody knows what became of {action}[: {q:result}].", "unknown", "warn"},
	audit.ActionSnooze:   {"snooze", "{who} put {action} off on their own list, until {time:until}.", "", ""},
	audit.ActionAssign:   {"person", "{who} changed who looks at {action}[: now {person:person}][, before {person:was}].", "", ""},
	audit.ActionResolve:  {"person", "{who} said what became of {action}: {state}[, {q:reason}].", "settled", "accent"},
	audit.ActionTampered: {"warn", "Another program changed {action} in the database[: {q:why}].", "tampered", "bad"},

	audit.AppConnect: {"key", "{who} connected the app {b:app}[ with the inbox of {inbox:inbox}].", "access", "accent"},
	audit.AppRevoke:  {"key", "{who} disconnected an app[ from the inbox of {inbox:inbox}][: {q:why}].", "access", "accent"},

	audit.BoundarySet:    {"policy", "{who} set the boundary of the project’s contracts.", "rules", "accent"},
	audit.BoundaryRemove: {"policy", "{who} removed the boundary of the project’s contracts.", "rules", "accent"},

	audit.ConnectCreate:   {"key", "{who} made a connect code[ for {b:address}][, until {time:ends}].", "access", "accent"},
	audit.ConnectUse:      {"agent", "An agent connected by a code[, as {inbox:inbox}].", "access", "accent"},
	audit.ConnectAgain:    {"warn", "A connect code that was used already was shown again[, for {inbox:inbox}].", "refused", "bad"},
	audit.ConnectWithdraw: {"key", "{who} withdrew a connect code.", "access", ""},

	audit.ContractPut:    {"policy", "{who} stored the contract {b:object}[, version {version}].", "rules", "accent"},
	audit.ContractDelete: {"policy", "{who} removed the contract {b:object}.", "rules", "accent"},

	audit.RunPropose:  {"run", "{who} proposed {run:object}[ under the contract {b:contract}].", "", ""},
	audit.RunInput:    {"file", "{who} stored an input of {run:object}[, {size:size}].", "", ""},
	audit.RunRefuse:   {"run", "{run:object} was refused[: {q:reason}].", "refused", "bad"},
	audit.RunApprove:  {"run", "{run:object} may start.", "approved", "accent"},
	audit.RunStart:    {"run", "{run:object} started.", "started", ""},
	audit.RunCommand:  {"term", "Command {n} of {run:object} ended[ with exit code {exit}][, after {ms:ms}].", "", ""},
	audit.RunCollect:  {"run", "The commands of {run:object} ended.", "", ""},
	audit.RunCancel:   {"run", "{who} cancelled {run:object}.", "cancelled", ""},
	audit.RunEnd:      {"run", "{run:object} ended[: {q:reason}].", "ended", ""},
	audit.RunRemove:   {"box", "The kept sandbox of {run:object} was removed.", "", ""},
	audit.RunArtifact: {"file", "{run:object} offered a file[ of {size:size}][, {found}].", "artifact", ""},
	audit.RunFiles:    {"file", "{who} collected {n:files:file:files} of {run:object}[, {size:bytes}].", "", ""},
	audit.RunRelease:  {"seal", "A file of {run:object} was released.", "released", "good"},
	audit.RunProve:    {"seal", "{who} signed the statement about {run:object}[: {outcome}][, {violated} clauses violated].", "proved", "good"},

	audit.BenchOpen:  {"box", "A sandbox for a build started.", "", ""},
	audit.BenchClose: {"box", "A sandbox for a build ended.", "", ""},

	audit.CommandUse: {"term", "A command that was approved started, once: {action}.", "", ""},

	audit.DomainAdd:     {"globe", "{who} added the domain {b:name}.", "access", "accent"},
	audit.DomainVerify:  {"globe", "The domain {b:name} is verified.", "verified", "good"},
	audit.DomainDegrade: {"globe", "A DNS record of the domain {b:name} is missing.", "look", "warn"},
	audit.DomainFound:   {"globe", "The DNS records of the domain {b:name} are back.", "", "good"},
	audit.DomainLose:    {"globe", "The domain {b:name} is lost: its proof was withdrawn.", "lost", "bad"},
	audit.DomainRelease: {"globe", "The domain {b:name} waits for its proof again.", "look", "warn"},
	audit.DomainRemove:  {"globe", "{who} removed the domain {b:name}.", "access", "accent"},

	audit.EgressDenied:    {"globe", "{who} was refused a connection to {host}[: {reason}].", "refused", "bad"},
	audit.EgressConnected: {"globe", "{who} connected to {host}[: {reason}].", "by policy", ""},
	audit.EgressCaptured:  {"mail", "{who} began mail to {host}; the gate received it instead.", "captured", ""},
	audit.EgressCut:       {"globe", "The connection of {who} to {host} was cut[: {reason}].", "cut", "bad"},
	audit.EgressRepeated:  {"globe", "{who} repeated connections that are on the record[, {n:count:time:times}].", "", ""},
	audit.EgressRequest:   {"request", "{who} made a {method} request to {host}[: status {status}][, {size:bytes}].", "by policy", ""},

	audit.GrantMake:    {"key", "{who} made a grant over {inbox:inbox}.", "access", "accent"},
	audit.GrantExtend:  {"key", "{who} extended a grant to {inbox:inbox}.", "access", "accent"},
	audit.GrantAccount: {"key", "{who} made an account’s grant[, {q:name}].", "access", "accent"},
	audit.GrantRevoke:  {"key", "{who} revoked a grant[ over {n:inboxes:inbox:inboxes}].", "access", "accent"},

	audit.InboxCreate:      {"agent", "{who} made the inbox of {inbox:object}[, {b:address}].", "access", "accent"},
	audit.InboxUpdate:      {"agent", "{who} changed the inbox of {inbox:object}.", "", ""},
	audit.InboxDelete:      {"agent", "{who} deleted the inbox of {inbox:object}.", "access", "accent"},
	audit.InboxExpire:      {"agent", "The inbox of {inbox:object} was deleted, because its time ended.", "", ""},
	audit.InboxUndelete:    {"agent", "{who} restored the inbox of {inbox:object}.", "access", "accent"},
	audit.InboxPurge:       {"agent", "The mail of the deleted inbox of {inbox:object} was removed for good.", "", ""},
	audit.InboxUnaddress:   {"agent", "An inbox lost its address with the domain {b:domain}.", "", ""},
	audit.InboxExport:      {"save", "{who} exported the mail of {inbox:object}.", "exported", ""},
	audit.InboxMode:        {"policy", "{who} set the mode of {inbox:object} [from {mode:from} ]to {mode:to}[: {q:reason}].", "rules", "accent"},
	audit.InboxDemote:      {"policy", "The mode of {inbox:object} was lowered [from {mode:from} ]to {mode:to}[: {q:reason}].", "rules", "warn"},
	audit.InboxCode:        {"key", "{who} made a code for a mode of {inbox:object}[, {mode:to}].", "rules", "accent"},
	audit.InboxCodeUsed:    {"key", "{who} used a code for a mode of {inbox:object}.", "rules", "accent"},
	audit.InboxCodeWrong:   {"warn", "{who} tried a wrong code for a mode of {inbox:object}[, try {tries} of {of}].", "refused", "bad"},
	audit.InboxAllow:       {"policy", "{who} allowed {inbox:object} to write to {b:pattern} without approval[ until {time:expires_at}].", "rules", "accent"},
	audit.InboxDisallow:    {"policy", "{who} took {b:pattern} off the allow list of {inbox:object}.", "rules", "accent"},
	audit.InboxAnswers:     {"warn", "{inbox:object} and {b:to} exchanged {count} automatic answers within an hour: the next ones wait for a person.", "held", "warn"},
	audit.InboxOverseers:   {"policy", "{who} set the overseers[ to {b:addresses}].", "rules", "accent"},
	audit.InboxSending:     {"policy", "{who} set what {inbox:object} may send.", "rules", "accent"},
	audit.ProjectSending:   {"policy", "{who} set what the project may send.", "rules", "accent"},
	audit.InboxLend:        {"key", "{who} lent the key of {inbox:object}[ to {as:to}].", "access", ""},
	audit.InboxKeyAdd:      {"key", "{who} added a key to {inbox:object}.", "access", "accent"},
	audit.InboxKeyRotate:   {"key", "{who} replaced a key of {inbox:object}.", "access", "accent"},
	audit.InboxKeyRevoke:   {"key", "{who} revoked a key of {inbox:object}[: {q:why}].", "access", "accent"},
	audit.InboxRekey:       {"key", "{inbox:object} has new keys[, epoch {epoch}].", "access", ""},
	audit.InboxRecoveryAdd: {"key", "{who} made a recovery key of {inbox:object}.", "access", "accent"},
	audit.InboxRecover:     {"key", "{who} made a key of {inbox:object} with a recovery key.", "access", "warn"},

	audit.KeyCreate: {"key", "{who} made an API key[, {q:name}].", "access", "accent"},
	audit.KeyRevoke: {"key", "{who} revoked an API key[, {q:name}].", "access", "accent"},

	audit.MessageReceive:    {"mail", "Mail arrived for {inbox:inbox}[, {size:size}][, from the server {remote}].", "arrived", ""},
	audit.MessageQuarantine: {"mail", "Mail for {inbox:inbox} was put into quarantine[, {size:size}][: {reason}].", "held", "warn"},
	audit.MessageRelease:    {"mail", "{who} released mail for {inbox:inbox} from quarantine.", "released", "accent"},
	audit.MessageDrop:       {"mail", "{who} dropped mail for {inbox:inbox} from quarantine.", "dropped", ""},
	audit.MessageRequest:    {"send", "A request that sends mail was let through[ to {b:host}][, {n:recipients:recipient:recipients}].", "sent", ""},

	audit.NotifySent:    {"person", "{person:person} was told about {action}[ by {channel}].", "", ""},
	audit.NotifyFailed:  {"warn", "A notice about {action} could not be sent[ by {channel}].", "failed", "bad"},
	audit.NotifyNobody:  {"warn", "Nobody who is asked about {action} can be notified.", "look", "warn"},
	audit.NotifyDecided: {"person", "{who} decided in a chat about {action}[, by {channel}].", "", ""},
	audit.NotifyCode:    {"person", "{who} asked for a code to link a chat.", "", ""},
	audit.NotifyLink:    {"person", "{who} linked a chat[ by {channel}][, {q:name}].", "access", "accent"},
	audit.NotifyUnlink:  {"person", "{who} unlinked a chat[ by {channel}].", "access", "accent"},
	audit.NotifyTest:    {"person", "{who} sent a test notice[ by {channel}].", "", ""},

	audit.NotifyRoom:         {"person", "{who} set up a room for notices[, {q:name}][ at {kind}].", "access", "accent"},
	audit.NotifyRoomRemove:   {"person", "{who} removed a room for notices[, {q:name}].", "access", "accent"},
	audit.NotifyDevice:       {"person", "{who} lets a browser show notices[, {q:name}].", "access", ""},
	audit.NotifyDeviceRemove: {"person", "{who} took a browser off notices.", "access", ""},
	audit.NotifySettings:     {"person", "{who} changed how notices are sent[: {settings}].", "", ""},
	audit.NotifyEscalate:     {"clock", "Nobody had decided about {action}, so others were told[: {to}].", "look", "warn"},

	audit.ContextRead:     {"mail", "{who} read what {action} answers, by a grant for context.", "read", ""},
	audit.ContextHeld:     {"mail", "{who} read who sent mail that is in quarantine[ for {inbox:object}], by a grant for context.", "read", ""},
	audit.InboxContext:    {"key", "{who} made a grant for context of {inbox:object}[, for {person:person}].", "access", "accent"},
	audit.InboxContextUse: {"key", "{who} took up a grant for context of {inbox:object}.", "access", "accent"},

	audit.PermitGrant: {"policy", "{who} granted a permit[ for {b:hosts}][ for the secret {b:secret}][ for {sandbox:sandbox}], until {time:until}[, as {as:decider} decided].", "approved", "accent"},
	audit.PermitEnd:   {"policy", "{who} ended what was allowed[: {b:hosts}][, the secret {b:secret}].", "ended", "accent"},

	audit.PersonInvite:        {"person", "{who} invited a person[, {b:email}][, as {role}].", "access", "accent"},
	audit.PersonWithdraw:      {"person", "{who} withdrew an invitation.", "access", "accent"},
	audit.PersonRenew:         {"person", "{who} made a link for a new password of {person:object}.", "access", "accent"},
	audit.PersonCreate:        {"person", "{person:object} made an account.", "access", "accent"},
	audit.PersonPassword:      {"person", "{person:object} set a new password.", "access", "accent"},
	audit.PersonSignIn:        {"person", "{who} signed in[ with {factor}][ from {remote}].", "", ""},
	audit.PersonSignInFailed:  {"warn", "Somebody failed to sign in[ as {b:object}][ from {remote}][: wrong {wrong}].", "refused", "bad"},
	audit.PersonSignOut:       {"person", "{who} signed out.", "", ""},
	audit.PersonSessionEnd:    {"person", "{who} ended a session of {person:object}.", "access", ""},
	audit.PersonStepUp:        {"person", "{who} proved a second factor again[, {factor}].", "", ""},
	audit.PersonTOTPAdd:       {"person", "{who} added an authenticator app.", "access", "accent"},
	audit.PersonTOTPRemove:    {"person", "{who} removed an authenticator app.", "access", "accent"},
	audit.PersonPasskeyAdd:    {"person", "{who} added a passkey[, {q:name}].", "access", "accent"},
	audit.PersonPasskeyRemove: {"person", "{who} removed a passkey.", "access", "accent"},
	audit.PersonPasskeyCloned: {"warn", "A passkey of {person:object} that may have been copied was used[, {q:name}].", "look", "bad"},
	audit.PersonRecoveryCodes: {"person", "{who} made recovery codes.", "access", "accent"},
	audit.PersonRole:          {"person", "{who} changed the role of {person:object}[ from {from}][ to {to}].", "access", "accent"},
	audit.PersonReach:         {"person", "{who} set where {person:object} is notified[, {b:email}].", "access", ""},
	audit.PersonDisable:       {"person", "{who} disabled the account of {person:object}.", "access", "accent"},
	audit.PersonEnable:        {"person", "{who} enabled the account of {person:object}.", "access", "accent"},

	audit.PersonLinkOperator:   {"person", "{who} said that the operator at the machine is {person:object}[, which counts from {time:from} on].", "access", "accent"},
	audit.PersonUnlinkOperator: {"person", "{who} ended the link of the operator at the machine to {person:object}.", "access", "accent"},
	audit.PersonReset:          {"person", "{who} removed the second factor and the sessions of {person:object}.", "access", "accent"},

	audit.PolicyChange:  {"policy", "A new policy is in force[, approved by {as:decider}][, version {b:version}][, written by {as:author}].", "rules", "accent"},
	audit.ProjectCreate: {"home", "{who} made the project[ {b:name}].", "", ""},

	audit.RecordBackup:   {"save", "{who} made a backup of the database[, {size:bytes}].", "", ""},
	audit.RecordSeal:     {"chain", "{who} seals rows from here on.", "", ""},
	audit.RecordBroken:   {"chain", "The record does not verify[: {q:why}].", "broken", "bad"},
	audit.RecordCopy:     {"chain", "The database or the data directory is a copy: {why}. What was approved in it is asked again.", "broken", "bad"},
	audit.RecordRollback: {"chain", "The database is older than the record that is kept beside it.", "broken", "bad"},

	audit.RequestUse:  {"request", "A request that was approved was released, once: {action}.", "", ""},
	audit.RequestMade: {"request", "{action} was made[: {method}][ to {b:host}][, {result}].", "made", ""},

	audit.SandboxCommands:     {"term", "{sandbox:object} ran {n:started:program:programs}[; {refused} refused][, {held} held].", "", ""},
	audit.SandboxCreate:       {"box", "{who} made {sandbox:object}[ from {code:asked}][ for {inbox:inbox}].", "created", ""},
	audit.SandboxRunning:      {"box", "{sandbox:object} started[; it ends {time:ends}].", "started", ""},
	audit.SandboxStartAgain:   {"box", "The start of {sandbox:object} was repeated[: {q:reason}].", "", "warn"},
	audit.SandboxFork:         {"fork", "{who} forked {sandbox:object}.", "", ""},
	audit.SandboxTaken:        {"save", "{who} downloaded {code:path} of {sandbox:object}[, {size:size}].", "left", "accent"},
	audit.SandboxLooked:       {"file", "{who} looked at {code:path} of {sandbox:object}[, {size:size}].", "read", ""},
	audit.SandboxRecording:    {"save", "{who} downloaded the recording {code:name} of a terminal in {sandbox:object}[, {size:size}].", "left", "accent"},
	audit.SandboxShell:        {"term", "{who} opened a terminal in {sandbox:object}.", "terminal", "accent"},
	audit.SandboxShellEnd:     {"term", "The terminal of {who} in {sandbox:object} ended after {ms:ms}[: {q:reason}].", "", ""},
	audit.SandboxOrder:        {"term", "{who} ran a command in {sandbox:object}.", "command", "accent"},
	audit.SandboxOrderEnd:     {"term", "The command of {who} in {sandbox:object} ended[ with exit code {exit}][, after {ms:ms}].", "", ""},
	audit.SandboxNetwork:      {"globe", "{who} changed the network rules of {sandbox:object}.", "rules", "accent"},
	audit.SandboxTimeout:      {"clock", "{who} moved the end of {sandbox:object}[ to {time:ends}].", "", ""},
	audit.SandboxPause:        {"pause", "{who} began to pause {sandbox:object}[: {why}].", "", ""},
	audit.SandboxPaused:       {"pause", "{sandbox:object} is paused.", "paused", ""},
	audit.SandboxPauseFailed:  {"warn", "{sandbox:object} could not be paused[: {q:reason}].", "failed", "bad"},
	audit.SandboxResume:       {"box", "{who} began to resume {sandbox:object}[: {why}].", "", ""},
	audit.SandboxResumed:      {"box", "{sandbox:object} runs again[; it ends {time:ends}].", "resumed", ""},
	audit.SandboxResumeFailed: {"warn", "{sandbox:object} could not be resumed[: {q:reason}].", "failed", "bad"},
	audit.SandboxRecovered:    {"box", "{sandbox:object} was still running after a restart of the server.", "", ""},
	audit.SandboxKilled:       {"box", "{who} ended {sandbox:object}[: {reason}].", "ended", ""},
	audit.SandboxFailed:       {"warn", "{sandbox:object} could not start[: {q:reason}].", "failed", "bad"},
	audit.SandboxLost:         {"warn", "{sandbox:object} was lost[: {q:reason}].", "lost", "bad"},

	audit.SecretCreate:      {"lock", "{who} stored the secret {b:name}[ for {b:hosts}].", "access", "accent"},
	audit.SecretUpdate:      {"lock", "{who} changed the secret {b:name}.", "access", "accent"},
	audit.SecretRotate:      {"lock", "{who} replaced the secret {b:name}.", "access", "accent"},
	audit.SecretDelete:      {"lock", "{who} deleted the secret {b:name}.", "access", "accent"},
	audit.SecretMisdirected: {"lock", "{who} tried to send a secret to {host}, where it does not belong[: {reason}].", "refused", "bad"},
	audit.SecretStayed:      {"lock", "{who} sent the placeholder of a secret to {host} as text[: {reason}].", "", ""},
	audit.SecretOpen:        {"lock", "{who} opened a place for the value of {name}: {place}.", "opened", "warn"},
	audit.SecretClose:       {"lock", "{who} closed a place for the value of {name}: {place}.", "", ""},
	audit.SecretMasked:      {"lock", "An answer of {host} to {who} had a secret in it; it was masked[: {reason}].", "masked", "warn"},

	audit.SendingSuspend: {"stop", "Sending was suspended[: {q:reason}].", "stopped", "bad"},
	audit.SendingLift:    {"check", "{who} lifted the suspension of sending[: {q:reason}].", "rules", "accent"},

	audit.SetupCreate: {"key", "{who} made a setup link for an owner.", "access", "accent"},

	audit.SignIngAdd:    {"seal", "{who} added a signing key[ for {b:object}].", "access", ""},
	audit.SignIngUse:    {"seal", "A signing key is in use[ for {b:object}].", "", ""},
	audit.SignIngRemove: {"seal", "{who} removed a signing key[ of {b:object}].", "access", ""},

	audit.SnapshotCreate: {"fork", "{who} made a snapshot of {sandbox:sandbox}[, {q:name}].", "", ""},
	audit.SnapshotDelete: {"fork", "{who} deleted a snapshot.", "", ""},

	audit.SuppressionAdd:    {"mail", "A recipient was put on the suppression list[: {reason}].", "", ""},
	audit.SuppressionRemove: {"mail", "{who} took a recipient off the suppression list.", "", ""},

	audit.SwitchOn:  {"switch", "{who} turned a kill switch on for {scope}[ {b:target}][: {q:reason}].", "stopped", "bad"},
	audit.SwitchOff: {"switch", "{who} turned a kill switch off.", "rules", "accent"},

	audit.TemplateCreate:      {"box", "{who} made the template[ {b:name}].", "", ""},
	audit.TemplateBuild:       {"box", "The template[ {b:name}] was built.", "built", "good"},
	audit.TemplateBuildDelete: {"box", "{who} deleted a build of the template[ {b:name}][, {size:bytes}].", "", ""},
	audit.TemplateBuildFailed: {"warn", "The build of the template[ {b:name}] failed[, at the step {q:step}][: {q:reason}].", "failed", "bad"},
	audit.TemplateTag:         {"box", "{who} moved the tag {b:tag} of a template.", "", ""},
	audit.TemplateUntag:       {"box", "{who} removed the tag {b:tag} of a template.", "", ""},
	audit.TemplatePublish:     {"box", "{who} published the template[ {b:name}] to other projects.", "rules", "accent"},
	audit.TemplateUnpublish:   {"box", "{who} no longer publishes the template[ {b:name}].", "rules", "accent"},
	audit.TemplateDelete:      {"box", "{who} deleted the template[ {b:name}].", "", ""},

	audit.VerificationBegin: {"heart", "{who} began a verification of the server[, {n:checks:check:checks}].", "", ""},
	audit.VerificationEnd:   {"heart", "A verification of the server ended[: {passed} passed][, {failed} failed][, {open} open by configuration].", "", ""},

	audit.VolumeCreate: {"disk", "{who} made the volume[ {b:name}].", "", ""},
	audit.VolumeMount:  {"disk", "{who} mounted the volume[ {b:name}].", "", ""},
	audit.VolumeDelete: {"disk", "{who} deleted the volume[ {b:name}].", "", ""},

	audit.MailboxConnect:    {"mail", "{who} connected the mailbox {b:address}[ to {inbox:inbox}].", "access", "accent"},
	audit.MailboxSignIn:     {"mail", "{who} replaced the credential of a connected mailbox[ of {inbox:inbox}].", "access", "accent"},
	audit.MailboxRefused:    {"warn", "A provider refuses the credential of the mailbox[ of {inbox:inbox}][: {q:problem}].", "failed", "bad"},
	audit.MailboxPause:      {"pause", "{who} paused a connected mailbox[ of {inbox:inbox}].", "access", "accent"},
	audit.MailboxResume:     {"mail", "{who} resumed a connected mailbox[ of {inbox:inbox}].", "access", "accent"},
	audit.MailboxResync:     {"mail", "{who} synchronised a connected mailbox[ of {inbox:inbox}] from the beginning.", "access", "accent"},
	audit.MailboxDisconnect: {"mail", "{who} disconnected a mailbox[ of {inbox:inbox}] and deleted its credential.", "access", "accent"},
	audit.MailboxImport:     {"mail", "{who} took {n:messages:older message:older messages} from the provider[ for {inbox:inbox}].", "", ""},
	audit.MailboxApply:      {"mail", "Changes were applied at the provider[ for {inbox:inbox}].", "", ""},
	audit.MailboxVanish:     {"mail", "{who} removed {n:messages:message:messages} of {inbox:object}, gone at the provider.", "", ""},

	audit.WebhookCreate:    {"globe", "{who} made the webhook[ {b:name}][ to {b:to}].", "access", "accent"},
	audit.WebhookUpdate:    {"globe", "{who} changed the webhook[ {b:name}].", "access", "accent"},
	audit.WebhookRotate:    {"globe", "{who} replaced the secret of a webhook.", "access", "accent"},
	audit.WebhookRedeliver: {"globe", "{who} had an event delivered again.", "", ""},
	audit.WebhookDisable:   {"globe", "A webhook was disabled[: {q:reason}].", "look", "warn"},
	audit.WebhookDelete:    {"globe", "{who} deleted the webhook[ {b:name}].", "access", "accent"},
}

// proposed has the sayings for proposals in some states, instead of the saying of the verb.
var proposed = map[oversight.State]saying{ //nolint:exhaustive // the other states have the saying of the verb
	oversight.Pending:  {"send", "{who} {ask} {action!}. It waits for a person[: {verdict}].", "held", "warn"},
	oversight.Approved: {"send", "{who} {ask} {action!}. Policy allows it[: {verdict}].", "by policy", ""},
	oversight.Denied:   {"send", "{who} {ask} {action!}. Policy refuses it[: {verdict}].", "refused", "bad"},
}
