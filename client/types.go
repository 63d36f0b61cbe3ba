package client

import (
	"encoding/json"
	"time"

	"postern/internal/api"
)

// The types of the API. docs/openapi.yaml describes the same JSON.
//
//nolint:revive // package api says of each what it is
type (
	Account               = api.Account
	Boundary              = api.Boundary
	Contract              = api.Contract
	NewInput              = api.NewInput
	NewRun                = api.NewRun
	Run                   = api.Run
	RunAnswers            = api.RunAnswers
	RunArtifact           = api.RunArtifact
	RunArtifactList       = api.RunArtifactList
	RunClause             = api.RunClause
	RunCommandResult      = api.RunCommandResult
	RunContact            = api.RunContact
	RunDecision           = api.RunDecision
	RunLimit              = api.RunLimit
	RunMail               = api.RunMail
	RunProgram            = api.RunProgram
	RunPrograms           = api.RunPrograms
	RunReport             = api.RunReport
	RunSecret             = api.RunSecret
	RunTrace              = api.RunTrace
	RunUsage              = api.RunUsage
	RunWrite              = api.RunWrite
	RunFile               = api.RunFile
	RunEvent              = api.RunEvent
	RunEventList          = api.RunEventList
	RunInput              = api.RunInput
	RunNeeds              = api.RunNeeds
	Action                = api.Action
	AllowEntry            = api.AllowEntry
	AllowRequest          = api.AllowRequest
	Approval              = api.Approval
	Arrivals              = api.Arrivals
	AuditEntry            = api.AuditEntry
	AuditList             = api.AuditList
	BatchDecision         = api.BatchDecision
	Change                = api.Change
	Checkpoint            = api.Checkpoint
	Comment               = api.Comment
	ConnectCode           = api.ConnectCode
	Connected             = api.Connected
	NewConnectCode        = api.NewConnectCode
	Contact               = api.Contact
	Credential            = api.Credential
	Decision              = api.Decision
	DecisionResult        = api.DecisionResult
	Delivery              = api.Delivery
	DeliveryState         = api.DeliveryState
	Direction             = api.Direction
	Domain                = api.Domain
	Secret                = api.Secret
	NewGmailSignIn        = api.NewGmailSignIn
	GmailSignIn           = api.GmailSignIn
	NewGmailMailbox       = api.NewGmailMailbox
	GmailMailbox          = api.GmailMailbox
	SecretChange          = api.SecretChange
	SecretValue           = api.SecretValue
	NewSecret             = api.NewSecret
	DomainRecord          = api.DomainRecord
	DomainRecords         = api.DomainRecords
	DomainState           = api.DomainState
	Draft                 = api.Draft
	DraftContent          = api.DraftContent
	DraftUpdate           = api.DraftUpdate
	DraftVersion          = api.DraftVersion
	Edit                  = api.Edit
	Effect                = api.Effect
	Evaluation            = api.Evaluation
	EvaluationResult      = api.EvaluationResult
	Event                 = api.Event
	EventList             = api.EventList
	Field                 = api.Field
	File                  = api.File
	Finding               = api.Finding
	FullMessage           = api.FullMessage
	FullThread            = api.FullThread
	Held                  = api.Held
	HeldMessage           = api.HeldMessage
	Inbox                 = api.Inbox
	InboxChange           = api.InboxChange
	Invitation            = api.Invitation
	Label                 = api.Label
	LabelChange           = api.LabelChange
	LabelledMessage       = api.LabelledMessage
	Message               = api.Message
	MessageList           = api.MessageList
	Mode                  = api.Mode
	ModeCode              = api.ModeCode
	ModeRequest           = api.ModeRequest
	NewAllowEntry         = api.NewAllowEntry
	NewAttachment         = api.NewAttachment
	NewComment            = api.NewComment
	NewDraft              = api.NewDraft
	NewGrant              = api.NewGrant
	NewInbox              = api.NewInbox
	NewInvitation         = api.NewInvitation
	NewKey                = api.NewKey
	ContextGrant          = api.ContextGrant
	NewContextGrant       = api.NewContextGrant
	NewMessage            = api.NewMessage
	NewModeCode           = api.NewModeCode
	NewPolicy             = api.NewPolicy
	NarrowedProposal      = api.NarrowedProposal
	NewSwitch             = api.NewSwitch
	Allowance             = api.Allowance
	NewNotifyRoom         = api.NewNotifyRoom
	NewSlackLink          = api.NewSlackLink
	NewSnooze             = api.NewSnooze
	NotifyDevice          = api.NotifyDevice
	NotifyRoom            = api.NotifyRoom
	NotifySettings        = api.NotifySettings
	NotifySettingsStatus  = api.NotifySettingsStatus
	ProjectNotifySettings = api.ProjectNotifySettings
	QueueCounts           = api.QueueCounts
	QueuedAction          = api.QueuedAction
	ReviewQueue           = api.ReviewQueue
	SlackAccount          = api.SlackAccount
	Snooze                = api.Snooze
	NotifyChannels        = api.NotifyChannels
	NotifyStatus          = api.NotifyStatus
	NotifyTest            = api.NotifyTest
	Person                = api.Person
	PersonChange          = api.PersonChange
	PolicyFile            = api.PolicyFile
	PolicyHistory         = api.PolicyHistory
	PolicyRequest         = api.PolicyRequest
	PolicyStep            = api.PolicyStep
	PolicyTest            = api.PolicyTest
	PolicyText            = api.PolicyText
	PolicyVersion         = api.PolicyVersion
	Proof                 = api.Proof
	Proposed              = api.Proposed
	Quota                 = api.Quota
	Recover               = api.Recover
	Reply                 = api.Reply
	Resolution            = api.Resolution
	Review                = api.Review
	RevisedMessage        = api.RevisedMessage
	Revision              = api.Revision
	Role                  = api.Role
	RotatedWebhook        = api.RotatedWebhook
	SafeContent           = api.SafeContent
	Permit                = api.Permit
	SandboxCommand        = api.SandboxCommand
	SandboxCommands       = api.SandboxCommands
	SandboxOrder          = api.SandboxOrder
	Trace                 = api.Trace
	TraceStep             = api.TraceStep
	Scope                 = api.Scope
	App                   = api.App
	SearchResult          = api.SearchResult
	Security              = api.Security
	SendDraft             = api.SendDraft
	SendLimits            = api.SendLimits
	SendSettings          = api.SendSettings
	SendStatus            = api.SendStatus
	Me                    = api.Me
	Session               = api.Session
	SignIn                = api.SignIn
	SigningKey            = api.SigningKey
	State                 = api.State
	Suppression           = api.Suppression
	Suspension            = api.Suspension
	Switch                = api.Switch
	TelegramCode          = api.TelegramCode
	Thread                = api.Thread
	ThreadList            = api.ThreadList
	Timing                = api.Timing
	Verdict               = api.Verdict
	View                  = api.View
	Webhook               = api.Webhook
	WebhookChange         = api.WebhookChange
	WebhookDelivery       = api.WebhookDelivery
	WebhookRotation       = api.WebhookRotation

	Connection           = api.Connection
	ConnectionCredential = api.ConnectionCredential
	NewConnection        = api.NewConnection
)

// The values of typed fields; the types say what they mean.
const (
	EventInboxCreated       = api.EventInboxCreated
	EventInboxDeleted       = api.EventInboxDeleted
	EventMessageReceived    = api.EventMessageReceived
	EventMessageQuarantined = api.EventMessageQuarantined
	EventMessageSent        = api.EventMessageSent
	EventMessageDelivered   = api.EventMessageDelivered
	EventMessageDeferred    = api.EventMessageDeferred
	EventMessageBounced     = api.EventMessageBounced
	EventMessageComplained  = api.EventMessageComplained
	EventOversightPending   = api.EventOversightPending
	EventOversightApproved  = api.EventOversightApproved
	EventOversightRejected  = api.EventOversightRejected
	EventOversightCancelled = api.EventOversightCancelled
	EventOversightExpired   = api.EventOversightExpired
	EventOversightCommented = api.EventOversightCommented
	EventInboxModeChanged   = api.EventInboxModeChanged
	EventSwitchOn           = api.EventSwitchOn
	EventSwitchOff          = api.EventSwitchOff
	StateScheduled          = api.StateScheduled
	StatePending            = api.StatePending
	StateDenied             = api.StateDenied
	StateApproved           = api.StateApproved
	StateExecuting          = api.StateExecuting
	StateDone               = api.StateDone
	StateFailed             = api.StateFailed
	StateUnknown            = api.StateUnknown
	StateCancelled          = api.StateCancelled
	PermitNetwork           = api.PermitNetwork
	PermitSecret            = api.PermitSecret
	PermitConnection        = api.PermitConnection
	PermitRequest           = api.PermitRequest
	SwitchInbox             = api.SwitchInbox
	SwitchCapability        = api.SwitchCapability
	SwitchDomain            = api.SwitchDomain
	SwitchProject           = api.SwitchProject
	SwitchEverything        = api.SwitchEverything
	DeliveryQueued          = api.DeliveryQueued
	DeliverySending         = api.DeliverySending
	DeliveryDelivered       = api.DeliveryDelivered
	DeliveryDeferred        = api.DeliveryDeferred
	DeliveryBounced         = api.DeliveryBounced
	DeliverySuppressed      = api.DeliverySuppressed
	DeliveryUncertain       = api.DeliveryUncertain
	DeliveryCancelled       = api.DeliveryCancelled
	DomainPending           = api.DomainPending
	ConnectionSyncing       = api.ConnectionSyncing
	ConnectionConnected     = api.ConnectionConnected
	ConnectionPaused        = api.ConnectionPaused
	ConnectionSignIn        = api.ConnectionSignIn
	ConnectionRevoked       = api.ConnectionRevoked
	SecretPlain             = api.SecretPlain
	SecretAWS               = api.SecretAWS
	SecretAlways            = api.SecretAlways
	SecretFirst             = api.SecretFirst
	SecretNever             = api.SecretNever
	DomainVerified          = api.DomainVerified
	DomainDegraded          = api.DomainDegraded
	DomainLost              = api.DomainLost
	ModeReadOnly            = api.ModeReadOnly
	ModeGatedAll            = api.ModeGatedAll
	ModeGatedSend           = api.ModeGatedSend
	ModeMonitored           = api.ModeMonitored
	ModeAutonomous          = api.ModeAutonomous
	ScopeRead               = api.ScopeRead
	ScopeDraft              = api.ScopeDraft
	ScopeSend               = api.ScopeSend
	ScopePropose            = api.ScopePropose
	ScopeFull               = api.ScopeFull
	ScopeRecover            = api.ScopeRecover
	CredentialKey           = api.CredentialKey
	CredentialGrant         = api.CredentialGrant
	CredentialRecovery      = api.CredentialRecovery
	DirectionIn             = api.DirectionIn
	DirectionOut            = api.DirectionOut
	RoleOwner               = api.RoleOwner
	RoleReviewer            = api.RoleReviewer
	RoleViewer              = api.RoleViewer
	Allow                   = api.Allow
	Ask                     = api.Ask
	Deny                    = api.Deny
	GateFirst               = api.GateFirst
	ScheduleFirst           = api.ScheduleFirst
	StatusPending           = api.StatusPending
	StatusScheduled         = api.StatusScheduled
	StatusApproved          = api.StatusApproved
	RunDraft                = api.RunDraft
	RunProposed             = api.RunProposed
	RunRefused              = api.RunRefused
	RunStarting             = api.RunStarting
	RunRunning              = api.RunRunning
	RunCollecting           = api.RunCollecting
	RunEnded                = api.RunEnded
	RunSucceeded            = api.RunSucceeded
	RunFailed               = api.RunFailed
	RunViolated             = api.RunViolated
	RunTimedOut             = api.RunTimedOut
	RunCancelled            = api.RunCancelled
	RunLost                 = api.RunLost
	RunRefusedByBoundary    = api.RunRefusedByBoundary
	RunRefusedByEvidence    = api.RunRefusedByEvidence
	RunRefusedByReview      = api.RunRefusedByReview
	RunRefusedByTime        = api.RunRefusedByTime
	RunEventState           = api.RunEventState
	RunEventDecision        = api.RunEventDecision
	RunEventCommand         = api.RunEventCommand
	RunEventExit            = api.RunEventExit
	RunEventOutput          = api.RunEventOutput
	RunEventLimit           = api.RunEventLimit
	RunEventViolation       = api.RunEventViolation
	RunEventArtifact        = api.RunEventArtifact
)

// Attach returns an attachment of a [NewMessage] with the given content.
func Attach(name, contentType string, content []byte) NewAttachment {
	return api.Attach(name, contentType, content)
}

// ExpireAt returns the value of [InboxChange].ExpiresAt that deletes the inbox
// at t.
func ExpireAt(t time.Time) json.RawMessage { return api.ExpireAt(t) }

// NeverExpire returns the value of [InboxChange].ExpiresAt that removes the end
// of an inbox.
func NeverExpire() json.RawMessage { return api.NeverExpire() }
