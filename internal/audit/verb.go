package audit

import (
	"maps"
	"slices"
)

// A Verb says what an entry records, as "noun.verb". Verbs of the same noun share
// their prefix, by which [Query.Verb] selects them.
type Verb string

// The verbs. To add one, add its constant here and its row to verbs: [Append]
// refuses a verb without a row.
const (
	ActionPropose  Verb = "action.propose"
	ActionRevise   Verb = "action.revise"
	ActionAsk      Verb = "action.ask"
	ActionVote     Verb = "action.vote"
	ActionApprove  Verb = "action.approve"
	ActionLate     Verb = "action.late"
	ActionReject   Verb = "action.reject"
	ActionExpire   Verb = "action.expire"
	ActionStop     Verb = "action.stop"
	ActionCancel   Verb = "action.cancel"
	ActionComment  Verb = "action.comment"
	ActionSnooze   Verb = "action.snooze"
	ActionAssign   Verb = "action.assign"
	ActionExecute  Verb = "action.execute"
	ActionDefer    Verb = "action.defer"
	ActionRetry    Verb = "action.retry"
	ActionDone     Verb = "action.done"
	ActionFailed   Verb = "action.failed"
	ActionUnknown  Verb = "action.unknown"
	ActionResolve  Verb = "action.resolve"
	ActionTampered Verb = "action.tampered"

	AppConnect Verb = "app.connect"
	AppRevoke  Verb = "app.revoke"

	BoundarySet    Verb = "boundary.set"
	BoundaryRemove Verb = "boundary.remove"

	ConnectCreate   Verb = "connect.create"
	ConnectUse      Verb = "connect.use"
	ConnectAgain    Verb = "connect.again"
	ConnectWithdraw Verb = "connect.withdraw"

	ContractPut    Verb = "contract.put"
	ContractDelete Verb = "contract.delete"

	RunPropose Verb = "run.propose"
	RunInput   Verb = "run.input"
	RunRefuse  Verb = "run.refuse"
	RunApprove Verb = "run.approve"
	RunStart   Verb = "run.start"
	RunCommand Verb = "run.command"
	RunCollect Verb = "run.collect"
	RunCancel  Verb = "run.cancel"
	RunEnd     Verb = "run.end"
	RunRemove  Verb = "run.remove"

	BenchOpen  Verb = "bench.open"
	BenchClose Verb = "bench.close"

	CommandUse Verb = "command.use"

	DomainAdd     Verb = "domain.add"
	DomainVerify  Verb = "domain.verify"
	DomainDegrade Verb = "domain.degrade"
	DomainFound   Verb = "domain.found"
	DomainLose    Verb = "domain.lose"
	DomainRelease Verb = "domain.release"
	DomainRemove  Verb = "domain.remove"

	EgressDenied    Verb = "egress.denied"
	EgressConnected Verb = "egress.connected"
	EgressCaptured  Verb = "egress.captured"
	EgressCut       Verb = "egress.cut"
	EgressRepeated  Verb = "egress.repeated"
	EgressRequest   Verb = "egress.request"

	GrantMake    Verb = "grant.make"
	GrantExtend  Verb = "grant.extend"
	GrantAccount Verb = "grant.account"
	GrantRevoke  Verb = "grant.revoke"

	InboxCreate      Verb = "inbox.create"
	InboxUpdate      Verb = "inbox.update"
	InboxDelete      Verb = "inbox.delete"
	InboxExpire      Verb = "inbox.expire"
	InboxUndelete    Verb = "inbox.undelete"
	InboxPurge       Verb = "inbox.purge"
	InboxUnaddress   Verb = "inbox.unaddress"
	InboxExport      Verb = "inbox.export"
	InboxMode        Verb = "inbox.mode"
	InboxDemote      Verb = "inbox.demote"
	InboxCode        Verb = "inbox.code"
	InboxCodeUsed    Verb = "inbox.code_used"
	InboxCodeWrong   Verb = "inbox.code_wrong"
	InboxAllow       Verb = "inbox.allow"
	InboxDisallow    Verb = "inbox.disallow"
	InboxOverseers   Verb = "inbox.overseers"
	InboxAnswers     Verb = "inbox.answers"
	InboxSending     Verb = "inbox.sending"
	ProjectSending   Verb = "project.sending"
	InboxLend        Verb = "inbox.lend"
	InboxContext     Verb = "inbox.context"        // a reviewer's grant for context was made
	InboxContextUse  Verb = "inbox.context.redeem" // and redeemed in a browser
	ContextRead      Verb = "context.read"         // a reviewer read what an action is about
	ContextHeld      Verb = "context.held"         // and who sent what is in quarantine
	InboxKeyAdd      Verb = "inbox.key.add"
	InboxKeyRotate   Verb = "inbox.key.rotate"
	InboxKeyRevoke   Verb = "inbox.key.revoke"
	InboxRekey       Verb = "inbox.rekey"
	InboxRecoveryAdd Verb = "inbox.recovery.add"
	InboxRecover     Verb = "inbox.recover"

	KeyCreate Verb = "key.create"
	KeyRevoke Verb = "key.revoke"

	MessageReceive    Verb = "message.receive"
	MessageQuarantine Verb = "message.quarantine"
	MessageRelease    Verb = "message.release"
	MessageDrop       Verb = "message.drop"
	MessageRequest    Verb = "message.request"

	NotifySent    Verb = "notify.sent"
	NotifyFailed  Verb = "notify.failed"
	NotifyNobody  Verb = "notify.nobody"
	NotifyDecided Verb = "notify.decided"
	NotifyCode    Verb = "notify.code"
	NotifyLink    Verb = "notify.link"
	NotifyUnlink  Verb = "notify.unlink"
	NotifyTest    Verb = "notify.test"

	NotifyRoom         Verb = "notify.room"
	NotifyRoomRemove   Verb = "notify.room_remove"
	NotifyDevice       Verb = "notify.device"
	NotifyDeviceRemove Verb = "notify.device_remove"
	NotifySettings     Verb = "notify.settings"
	NotifyEscalate     Verb = "notify.escalate"

	PermitGrant Verb = "permit.grant"
	PermitEnd   Verb = "permit.end"

	PersonInvite        Verb = "person.invite"
	PersonWithdraw      Verb = "person.withdraw"
	PersonRenew         Verb = "person.renew"
	PersonCreate        Verb = "person.create"
	PersonPassword      Verb = "person.password"
	PersonSignIn        Verb = "person.signin"
	PersonSignInFailed  Verb = "person.signin_failed"
	PersonSignOut       Verb = "person.signout"
	PersonSessionEnd    Verb = "person.session_end"
	PersonStepUp        Verb = "person.step_up"
	PersonTOTPAdd       Verb = "person.totp_add"
	PersonTOTPRemove    Verb = "person.totp_remove"
	PersonPasskeyAdd    Verb = "person.passkey_add"
	PersonPasskeyRemove Verb = "person.passkey_remove"
	PersonPasskeyCloned Verb = "person.passkey_cloned"
	PersonRecoveryCodes Verb = "person.recovery_codes"
	PersonRole          Verb = "person.role"
	PersonReach         Verb = "person.reach"
	PersonDisable       Verb = "person.disable"
	PersonEnable        Verb = "person.enable"
	PersonReset         Verb = "person.reset"

	PersonLinkOperator   Verb = "person.link_operator"
	PersonUnlinkOperator Verb = "person.unlink_operator"

	PolicyChange Verb = "policy.change"

	ProjectCreate Verb = "project.create"

	RecordBackup   Verb = "record.backup"
	RecordSeal     Verb = "record.seal"
	RecordBroken   Verb = "record.broken"
	RecordCopy     Verb = "record.copy"
	RecordRollback Verb = "record.rollback"

	RequestUse  Verb = "request.use"
	RequestMade Verb = "request.made"

	RunArtifact Verb = "run.artifact"
	RunFiles    Verb = "run.files"
	RunRelease  Verb = "run.release"
	RunProve    Verb = "run.prove"

	SandboxCommands     Verb = "sandbox.commands"
	SandboxCreate       Verb = "sandbox.create"
	SandboxRunning      Verb = "sandbox.running"
	SandboxStartAgain   Verb = "sandbox.start_again"
	SandboxFork         Verb = "sandbox.fork"
	SandboxTaken        Verb = "sandbox.taken"
	SandboxLooked       Verb = "sandbox.looked"
	SandboxRecording    Verb = "sandbox.recording"
	SandboxShell        Verb = "sandbox.shell"
	SandboxShellEnd     Verb = "sandbox.shell_end"
	SandboxOrder        Verb = "sandbox.order"
	SandboxOrderEnd     Verb = "sandbox.order_end"
	SandboxNetwork      Verb = "sandbox.network"
	SandboxTimeout      Verb = "sandbox.timeout"
	SandboxPause        Verb = "sandbox.pause"
	SandboxPaused       Verb = "sandbox.paused"
	SandboxPauseFailed  Verb = "sandbox.pause_failed"
	SandboxResume       Verb = "sandbox.resume"
	SandboxResumed      Verb = "sandbox.resumed"
	SandboxResumeFailed Verb = "sandbox.resume_failed"
	SandboxRecovered    Verb = "sandbox.recovered"
	SandboxKilled       Verb = "sandbox.killed"
	SandboxFailed       Verb = "sandbox.failed"
	SandboxLost         Verb = "sandbox.lost"

	SecretCreate      Verb = "secret.create"
	SecretUpdate      Verb = "secret.update"
	SecretRotate      Verb = "secret.rotate"
	SecretDelete      Verb = "secret.delete"
	SecretMisdirected Verb = "secret.misdirected"
	SecretMasked      Verb = "secret.masked"
	SecretStayed      Verb = "secret.placeholder"
	SecretOpen        Verb = "secret.open"
	SecretClose       Verb = "secret.close"

	SendingSuspend Verb = "sending.suspend"
	SendingLift    Verb = "sending.lift"

	SetupCreate Verb = "setup.create"

	SignIngAdd    Verb = "signing.add"
	SignIngUse    Verb = "signing.use"
	SignIngRemove Verb = "signing.remove"

	SnapshotCreate Verb = "snapshot.create"
	SnapshotDelete Verb = "snapshot.delete"

	SuppressionAdd    Verb = "suppression.add"
	SuppressionRemove Verb = "suppression.remove"

	SwitchOn  Verb = "switch.on"
	SwitchOff Verb = "switch.off"

	TemplateCreate      Verb = "template.create"
	TemplateBuild       Verb = "template.build"
	TemplateBuildFailed Verb = "template.build_failed"
	TemplateBuildDelete Verb = "template.build_delete"
	TemplateTag         Verb = "template.tag"
	TemplateUntag       Verb = "template.untag"
	TemplatePublish     Verb = "template.publish"
	TemplateUnpublish   Verb = "template.unpublish"
	TemplateDelete      Verb = "template.delete"

	VerificationBegin Verb = "verification.begin"
	VerificationEnd   Verb = "verification.end"

	VolumeCreate Verb = "volume.create"
	VolumeMount  Verb = "volume.mount"
	VolumeDelete Verb = "volume.delete"

	MailboxConnect    Verb = "mailbox.connect"
	MailboxSignIn     Verb = "mailbox.sign_in"
	MailboxRefused    Verb = "mailbox.refused"
	MailboxPause      Verb = "mailbox.pause"
	MailboxResume     Verb = "mailbox.resume"
	MailboxResync     Verb = "mailbox.resync"
	MailboxDisconnect Verb = "mailbox.disconnect"
	MailboxImport     Verb = "mailbox.import"
	MailboxApply      Verb = "mailbox.apply"
	MailboxVanish     Verb = "mailbox.vanish"

	WebhookCreate    Verb = "webhook.create"
	WebhookUpdate    Verb = "webhook.update"
	WebhookRotate    Verb = "webhook.rotate"
	WebhookRedeliver Verb = "webhook.redeliver"
	WebhookDisable   Verb = "webhook.disable"
	WebhookDelete    Verb = "webhook.delete"
)

// Severity is how much attention an entry needs, on the scale of syslog (RFC
// 5424, section 6.2.1): lower is more severe.
type Severity int

// The severities that entries have.
const (
	Error   Severity = 3 // the server's own data was changed by somebody else
	Warning Severity = 4 // something failed or was refused
	Notice  Severity = 5 // a person used or changed a right
	Info    Severity = 6 // normal operation
)

// A verbRow is what is known of a verb. A row's severity is what a reader of the
// log filters by, so it belongs to the verb and does not depend on the entry.
type verbRow struct {
	severity Severity
	means    string // what happened, for a person
}

// verbs has a row for every verb.
//
//exhaustive:enforce
var verbs = map[Verb]verbRow{
	ActionPropose:  {Info, "proposed"},
	ActionRevise:   {Info, "written anew"},
	ActionAsk:      {Info, "its time came: a person is asked"},
	ActionVote:     {Info, "approved, as one of several"},
	ActionApprove:  {Notice, "approved"},
	ActionLate:     {Info, "approved too late: asked again"},
	ActionReject:   {Notice, "rejected"},
	ActionExpire:   {Info, "denied, because nobody decided in time"},
	ActionStop:     {Info, "stopped by a kill switch"},
	ActionCancel:   {Info, "cancelled"},
	ActionComment:  {Info, "commented on"},
	ActionSnooze:   {Info, "snoozed by a person, on their own list"},
	ActionAssign:   {Info, "assigned to a person"},
	ActionExecute:  {Info, "execution began"},
	ActionDefer:    {Info, "put off"},
	ActionRetry:    {Info, "no effect; to be tried again"},
	ActionDone:     {Info, "done"},
	ActionFailed:   {Warning, "failed"},
	ActionUnknown:  {Warning, "outcome unknown"},
	ActionResolve:  {Info, "resolved by a person"},
	ActionTampered: {Error, "its row in the database was changed by another program"},

	CommandUse: {Info, "approved command started, once"},

	DomainAdd:     {Info, "domain added"},
	DomainVerify:  {Info, "domain verified"},
	DomainDegrade: {Info, "a DNS record of the domain is missing"},
	DomainFound:   {Info, "the missing DNS records are back"},
	DomainLose:    {Info, "domain lost: its proof was withdrawn"},
	DomainRelease: {Info, "domain waits for its proof again"},
	DomainRemove:  {Info, "domain removed"},

	EgressDenied:    {Warning, "connection refused"},
	EgressConnected: {Info, "connection allowed"},
	EgressCaptured:  {Info, "mail conversation captured by the gate"},
	EgressCut:       {Info, "connection cut, because it is no longer allowed"},
	EgressRepeated:  {Info, "repeats of recorded connections, counted"},
	EgressRequest:   {Info, "inspected HTTP request forwarded"},

	AppConnect: {Info, "app connected"},
	AppRevoke:  {Info, "app disconnected"},

	GrantMake:    {Info, "grant made"},
	GrantExtend:  {Info, "inbox added to a grant"},
	GrantAccount: {Info, "account's grant made"},
	GrantRevoke:  {Info, "grant revoked"},

	InboxCreate:      {Info, "inbox created"},
	InboxUpdate:      {Info, "inbox changed"},
	InboxDelete:      {Info, "inbox deleted"},
	InboxExpire:      {Info, "inbox deleted, because its time ended"},
	InboxUndelete:    {Info, "inbox restored"},
	InboxPurge:       {Info, "mail of a deleted inbox removed for good"},
	InboxUnaddress:   {Info, "address freed with its domain"},
	InboxExport:      {Info, "mail exported"},
	InboxMode:        {Info, "mode set"},
	InboxDemote:      {Info, "mode lowered by a rule or a kill switch"},
	InboxCode:        {Info, "code for a mode made"},
	InboxCodeUsed:    {Info, "code for a mode used"},
	InboxCodeWrong:   {Info, "wrong code for a mode tried"},
	InboxAllow:       {Info, "entry added to the allow list"},
	InboxDisallow:    {Info, "entry removed from the allow list"},
	InboxOverseers:   {Info, "overseers set"},
	InboxAnswers:     {Warning, "automatic answer held: the limit of an hour is reached"},
	InboxSending:     {Info, "limits of the inbox set"},
	ProjectSending:   {Info, "limits of the project set"},
	InboxLend:        {Info, "open key lent to a sandbox"},
	InboxContext:     {Info, "context grant made for a reviewer"},
	InboxContextUse:  {Info, "context grant redeemed in a browser"},
	ContextRead:      {Info, "thread read by a reviewer"},
	ContextHeld:      {Info, "senders in quarantine read by a reviewer"},
	InboxKeyAdd:      {Info, "key added"},
	InboxKeyRotate:   {Info, "key replaced"},
	InboxKeyRevoke:   {Info, "key revoked"},
	InboxRekey:       {Info, "new epoch of keys begun"},
	InboxRecoveryAdd: {Info, "recovery key made"},
	InboxRecover:     {Info, "key made with a recovery key"},

	KeyCreate: {Info, "API key made"},
	KeyRevoke: {Info, "API key revoked"},

	MessageReceive:    {Info, "mail received"},
	MessageQuarantine: {Info, "mail put into quarantine"},
	MessageRelease:    {Info, "mail released from quarantine"},
	MessageDrop:       {Info, "mail dropped from quarantine"},
	MessageRequest:    {Info, "sandbox let make its request that sends mail"},

	NotifySent:    {Info, "notice sent"},
	NotifyFailed:  {Warning, "notice could not be sent"},
	NotifyNobody:  {Info, "nobody who is asked can be notified"},
	NotifyDecided: {Info, "decided in a chat"},
	NotifyCode:    {Info, "code to link a chat made"},
	NotifyLink:    {Info, "chat linked"},
	NotifyUnlink:  {Info, "chat unlinked"},
	NotifyTest:    {Info, "test notice sent"},

	NotifyRoom:         {Info, "room for notices set up"},
	NotifyRoomRemove:   {Info, "room for notices removed"},
	NotifyDevice:       {Info, "browser takes push messages"},
	NotifyDeviceRemove: {Info, "browser takes no push messages any more"},
	NotifySettings:     {Info, "settings of notices changed"},
	NotifyEscalate:     {Info, "nobody had decided, so others were told"},

	PermitGrant: {Notice, "network permit or use of a secret granted"},
	PermitEnd:   {Notice, "permit ended before its time"},

	PersonInvite:        {Notice, "person invited"},
	PersonWithdraw:      {Notice, "invitation withdrawn"},
	PersonRenew:         {Notice, "link for a new password made"},
	PersonCreate:        {Notice, "account created"},
	PersonPassword:      {Notice, "password set"},
	PersonSignIn:        {Notice, "signed in"},
	PersonSignInFailed:  {Warning, "sign-in failed"},
	PersonSignOut:       {Notice, "signed out"},
	PersonSessionEnd:    {Notice, "session ended"},
	PersonStepUp:        {Notice, "second factor proved again"},
	PersonTOTPAdd:       {Notice, "authenticator app added"},
	PersonTOTPRemove:    {Notice, "authenticator app removed"},
	PersonPasskeyAdd:    {Notice, "passkey added"},
	PersonPasskeyRemove: {Notice, "passkey removed"},
	PersonPasskeyCloned: {Notice, "passkey that may have been copied was used"},
	PersonRecoveryCodes: {Notice, "recovery codes made"},
	PersonRole:          {Notice, "role changed"},
	PersonReach:         {Notice, "address for notices set"},
	PersonDisable:       {Notice, "account disabled"},
	PersonEnable:        {Notice, "account enabled"},

	PersonLinkOperator:   {Notice, "operator at the machine linked to an account"},
	PersonUnlinkOperator: {Notice, "operator at the machine no longer linked to an account"},
	PersonReset:          {Notice, "second factors and sessions removed by an owner"},

	PolicyChange: {Notice, "policy changed"},

	ProjectCreate: {Info, "project created"},

	RecordBackup:   {Info, "database copied"},
	RecordSeal:     {Info, "rows sealed from here on"},
	RecordBroken:   {Error, "the record does not verify"},
	RecordCopy:     {Error, "the database or the data directory is a copy"},
	RecordRollback: {Error, "the database is older than the record that is kept beside it"},

	RequestUse:  {Info, "approved request released, once"},
	RequestMade: {Info, "approved request made"},
	RunArtifact: {Info, "file of a run listed as an artifact, or refused"},
	RunFiles:    {Info, "files of a run collected"},
	RunRelease:  {Notice, "file of a run released"},
	RunProve:    {Info, "statement of a run signed"},

	BoundarySet:     {Notice, "boundary of the project's contracts set"},
	BoundaryRemove:  {Notice, "boundary of the project's contracts removed"},
	ConnectCreate:   {Notice, "connect code made"},
	ConnectUse:      {Notice, "an agent connected by a code"},
	ConnectAgain:    {Warning, "a used connect code was shown again"},
	ConnectWithdraw: {Info, "connect code withdrawn"},

	ContractPut:    {Info, "contract stored"},
	ContractDelete: {Info, "contract removed"},

	RunPropose: {Info, "run proposed"},
	RunInput:   {Info, "input of a run stored"},
	RunRefuse:  {Notice, "run refused"},
	RunApprove: {Info, "run approved"},
	RunStart:   {Info, "run started"},
	RunCommand: {Info, "command of a run ended"},
	RunCollect: {Info, "commands of a run ended"},
	RunCancel:  {Info, "run cancelled"},
	RunEnd:     {Info, "run ended"},
	RunRemove:  {Info, "kept sandbox of a run removed"},

	BenchOpen:           {Info, "sandbox of a build started"},
	BenchClose:          {Info, "sandbox of a build ended"},
	SandboxCommands:     {Info, "number and digest of its commands, when it ended"},
	SandboxCreate:       {Info, "sandbox created"},
	SandboxRunning:      {Info, "sandbox started"},
	SandboxStartAgain:   {Info, "start repeated"},
	SandboxFork:         {Info, "sandbox forked"},
	SandboxTaken:        {Notice, "file of a sandbox downloaded by a person"},
	SandboxLooked:       {Info, "file of a sandbox shown to a person"},
	SandboxRecording:    {Notice, "recording of a terminal downloaded by a person"},
	SandboxShell:        {Notice, "terminal opened by a person"},
	SandboxShellEnd:     {Info, "terminal of a person ended"},
	SandboxOrder:        {Notice, "command of a person begun"},
	SandboxOrderEnd:     {Info, "command of a person ended"},
	SandboxNetwork:      {Info, "network rules changed"},
	SandboxTimeout:      {Info, "end moved"},
	SandboxPause:        {Info, "pause began"},
	SandboxPaused:       {Info, "sandbox paused"},
	SandboxPauseFailed:  {Warning, "pause failed"},
	SandboxResume:       {Info, "resume began"},
	SandboxResumed:      {Info, "sandbox resumed"},
	SandboxResumeFailed: {Warning, "resume failed"},
	SandboxRecovered:    {Info, "sandbox found running after a restart of the server"},
	SandboxKilled:       {Info, "sandbox ended"},
	SandboxFailed:       {Warning, "sandbox could not start"},
	SandboxLost:         {Warning, "sandbox lost"},

	SecretCreate:      {Notice, "secret created"},
	SecretUpdate:      {Notice, "secret changed"},
	SecretRotate:      {Notice, "secret replaced"},
	SecretDelete:      {Notice, "secret deleted"},
	SecretMasked:      {Warning, "value of a secret in a server's answer; masked"},
	SecretStayed:      {Info, "placeholder of a secret sent as text, where no value goes"},
	SecretOpen:        {Warning, "a place in requests was opened for the value of a secret"},
	SecretClose:       {Info, "a place in requests was closed for the value of a secret"},
	SecretMisdirected: {Error, "secret sent to a host that it does not belong to; refused"},

	SendingSuspend: {Warning, "sending suspended for its reputation"},
	SendingLift:    {Info, "suspension lifted"},

	SetupCreate: {Info, "setup link for an owner made"},

	SignIngAdd:    {Info, "signing key added"},
	SignIngUse:    {Info, "signing key in use"},
	SignIngRemove: {Info, "signing key removed"},

	SnapshotCreate: {Info, "snapshot created"},
	SnapshotDelete: {Info, "snapshot deleted"},

	SuppressionAdd:    {Info, "recipient put on the suppression list"},
	SuppressionRemove: {Info, "recipient removed from the suppression list"},

	SwitchOn:  {Notice, "kill switch turned on"},
	SwitchOff: {Notice, "kill switch turned off"},

	TemplateCreate:      {Info, "template created"},
	TemplateBuild:       {Info, "template built"},
	TemplateBuildDelete: {Info, "build of a template deleted"},
	TemplateBuildFailed: {Warning, "build of a template failed"},
	TemplateTag:         {Info, "tag of a template moved to a build"},
	TemplateUntag:       {Info, "tag of a template removed"},
	TemplatePublish:     {Notice, "template published to other projects"},
	TemplateUnpublish:   {Notice, "template no longer published"},
	TemplateDelete:      {Info, "template deleted"},

	VerificationBegin: {Notice, "verification of the server begun"},
	VerificationEnd:   {Notice, "verification of the server ended"},

	VolumeCreate: {Info, "volume created"},
	VolumeMount:  {Info, "volume mounted"},
	VolumeDelete: {Info, "volume deleted"},

	MailboxConnect:    {Notice, "mailbox at another provider connected"},
	MailboxSignIn:     {Notice, "credential of a connected mailbox replaced"},
	MailboxRefused:    {Warning, "the provider refuses the credential"},
	MailboxPause:      {Notice, "connection paused"},
	MailboxResume:     {Notice, "connection resumed"},
	MailboxResync:     {Notice, "connection synchronised from the beginning"},
	MailboxDisconnect: {Notice, "connection ended, and its credential deleted"},
	MailboxImport:     {Info, "older messages taken from the provider"},
	MailboxApply:      {Info, "changes applied at the provider"},
	MailboxVanish:     {Info, "messages removed that are gone at the provider"},

	WebhookCreate:    {Info, "webhook created"},
	WebhookUpdate:    {Info, "webhook changed"},
	WebhookRotate:    {Info, "webhook's secret replaced"},
	WebhookRedeliver: {Info, "event delivered again"},
	WebhookDisable:   {Info, "webhook disabled"},
	WebhookDelete:    {Info, "webhook deleted"},
}

// Verbs returns every verb, sorted.
func Verbs() []Verb { return slices.Sorted(maps.Keys(verbs)) }

// Known reports whether v is one of the verbs of this version. A record may hold
// others, of another version.
func (v Verb) Known() bool {
	_, ok := verbs[v]
	return ok
}

// Severity returns how much attention an entry with this verb needs. It is
// [Info] for a verb that is not known.
func (v Verb) Severity() Severity {
	if row, ok := verbs[v]; ok {
		return row.severity
	}
	return Info
}

// Means returns what v records, for a person: "approved". It is v for a verb
// that is not known.
func (v Verb) Means() string {
	if row, ok := verbs[v]; ok {
		return row.means
	}
	return string(v)
}
