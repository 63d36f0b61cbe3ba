package api_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"postern/docs"
	"postern/internal/api"
)

// A wire is what an operation takes and answers. Nil: it has no JSON.
type wire struct{ in, out any }

var operations = map[string]wire{
	"listRuns": {nil, api.RunList{}}, "proposeRun": {api.NewRun{}, api.Run{}}, "getRun": {nil, api.Run{}}, "uploadRunInput": {nil, api.Run{}}, "submitRun": {nil, api.Run{}},
	"listRunEvents": {nil, api.RunEventList{}}, "cancelRun": {nil, api.Run{}},
	"listRunArtifacts": {nil, api.RunArtifactList{}}, "getRunArtifact": {nil, nil}, "getRunReport": {nil, api.RunReport{}}, "getRunStatement": {nil, nil},
	"listContracts": {nil, api.ContractList{}}, "getContract": {nil, api.Contract{}}, "putContract": {api.ContractText{}, api.Contract{}}, "deleteContract": {},
	"getBoundary": {nil, api.Boundary{}}, "setBoundary": {api.ContractText{}, api.Boundary{}}, "removeBoundary": {},
	"listPermits": {nil, api.PermitList{}}, "getPermit": {nil, api.Permit{}}, "getSandboxTrace": {nil, api.Trace{}}, "getSandboxCommands": {nil, api.SandboxCommands{}}, "endPermit": {nil, nil}, "narrowProposal": {api.NarrowedProposal{}, api.Action{}},
	"signInAtGoogle": {api.NewGmailSignIn{}, api.GmailSignIn{}}, "connectGmail": {api.NewGmailMailbox{}, api.GmailMailbox{}},
	"listSecrets": {nil, api.SecretList{}}, "createSecret": {api.NewSecret{}, api.Secret{}}, "getSecret": {nil, api.Secret{}},
	"updateSecret": {api.SecretChange{}, api.Secret{}}, "rotateSecret": {api.SecretValue{}, api.Secret{}}, "deleteSecret": {nil, nil},
	"listDomains": {nil, api.DomainList{}}, "addDomain": {api.NewDomain{}, api.Domain{}}, "getDomain": {nil, api.Domain{}},
	"removeDomain": {nil, api.RemovedDomain{}}, "getDomainRecords": {nil, api.DomainRecords{}}, "verifyDomain": {nil, api.Domain{}},
	"getMe":           {nil, api.Me{}},
	"listConnections": {nil, api.ConnectionList{}}, "connectMailbox": {api.NewConnection{}, api.Connection{}}, "getConnection": {nil, api.Connection{}}, "disconnectMailbox": {nil, api.Connection{}},
	"pauseConnection": {nil, api.Connection{}}, "resumeConnection": {nil, api.Connection{}}, "resyncConnection": {nil, api.Connection{}}, "signInConnection": {api.ConnectionCredential{}, api.Connection{}},
	"listInboxes": {nil, api.InboxList{}}, "createInbox": {api.NewInbox{}, api.Inbox{}}, "getInbox": {nil, api.Inbox{}},
	"updateInbox": {api.InboxChange{}, api.Inbox{}}, "deleteInbox": {nil, api.Inbox{}}, "undeleteInbox": {nil, api.Inbox{}},
	"makeModeCode": {api.NewModeCode{}, api.ModeCode{}}, "upgrade": {api.ModeUpgrade{}, api.Inbox{}}, "requestUpgrade": {api.ModeRequest{}, api.Action{}},
	"listAllowed": {nil, api.AllowList{}}, "addAllowed": {api.NewAllowEntry{}, api.AllowEntry{}}, "removeAllowed": {}, "requestAllowed": {api.AllowRequest{}, api.Action{}},
	"getInboxOverseers": {nil, api.Overseers{}}, "setInboxOverseers": {api.Overseers{}, api.Overseers{}},
	"getOverseers": {nil, api.Overseers{}}, "setOverseers": {api.Overseers{}, api.Overseers{}},
	"listKeys": {nil, api.KeyList{}}, "addKey": {api.NewKey{}, api.Credential{}}, "revokeKey": {}, "rotateKey": {nil, api.Credential{}},
	"addRecoveryKey": {nil, api.Credential{}}, "recoverInbox": {api.Recover{}, api.Credential{}},
	"listContextGrants": {nil, api.ContextGrantList{}}, "addContextGrant": {api.NewContextGrant{}, api.ContextGrant{}}, "revokeContextGrant": {},
	"listInboxGrants": {nil, api.GrantList{}}, "grantInbox": {api.NewGrant{}, api.Credential{}}, "revokeInboxGrant": {}, "listGrants": {nil, api.GrantList{}}, "revokeGrant": {}, "listApps": {nil, api.AppList{}}, "revokeApp": {},
	"listMessages": {nil, api.MessageList{}}, "getMessage": {nil, api.FullMessage{}}, "waitForMessages": {nil, api.Arrivals{}}, "searchMessages": {nil, api.SearchResult{}},
	"sendMessage": {api.NewMessage{}, api.Proposed{}}, "replyToMessage": {api.Reply{}, api.Proposed{}}, "forwardMessage": {api.NewMessage{}, api.Proposed{}},
	"reviseAction": {api.RevisedMessage{}, api.Proposed{}},
	"getSending":   {nil, api.SendStatus{}}, "setSending": {api.SendSettings{}, api.SendStatus{}}, "getProjectSending": {nil, api.SendStatus{}}, "setProjectSending": {api.SendSettings{}, api.SendStatus{}},
	"listThreads": {nil, api.ThreadList{}}, "getThread": {nil, api.FullThread{}}, "listContacts": {nil, api.ContactList{}},
	"listLabels": {nil, api.LabelList{}}, "changeLabels": {api.LabelChange{}, api.LabelledMessages{}},
	"listDrafts": {nil, api.DraftList{}}, "createDraft": {api.NewDraft{}, api.DraftVersion{}}, "getDraft": {nil, api.Draft{}}, "updateDraft": {api.DraftUpdate{}, api.DraftVersion{}},
	"deleteDraft": {}, "sendDraft": {api.SendDraft{}, api.Proposed{}},
	"listEvents": {nil, api.EventList{}}, "listWebhooks": {nil, api.WebhookList{}}, "createWebhook": {api.WebhookChange{}, api.Webhook{}}, "getWebhook": {nil, api.Webhook{}},
	"updateWebhook": {api.WebhookChange{}, api.Webhook{}}, "deleteWebhook": {}, "rotateWebhook": {api.WebhookRotation{}, api.RotatedWebhook{}},
	"listDeliveries": {nil, api.WebhookDeliveryList{}}, "redeliver": {nil, api.WebhookDelivery{}},
	"getPolicy": {nil, api.PolicyVersion{}}, "proposePolicy": {api.NewPolicy{}, api.Action{}}, "listPolicies": {nil, api.PolicyList{}}, "getPolicyVersion": {nil, api.PolicyVersion{}},
	"evaluatePolicy": {api.Evaluation{}, api.EvaluationResult{}},
	"listQuarantine": {nil, api.HeldList{}}, "releaseMessage": {}, "dropMessage": {}, "listHeldMessages": {nil, api.MessageList{}}, "getHeldMessage": {nil, api.HeldMessage{}},
	"listActions": {nil, api.ActionList{}}, "getAction": {nil, api.Action{}}, "decideAction": {api.Decision{}, api.Action{}}, "decideActions": {api.Decisions{}, api.DecisionResults{}},
	"getQueue": {nil, api.ReviewQueue{}}, "snoozeAction": {api.NewSnooze{}, api.Snooze{}}, "unsnoozeAction": {}, "assignAction": {api.NamedPerson{}, api.Action{}}, "unassignAction": {},
	"getNotifySettings": {nil, api.NotifySettingsStatus{}}, "setNotifySettings": {api.NotifySettings{}, api.NotifySettingsStatus{}}, "dropNotifySettings": {},
	"setProjectNotifySettings": {api.ProjectNotifySettings{}, api.NotifySettingsStatus{}},
	"listNotifyRooms":          {nil, api.NotifyRoomList{}}, "addNotifyRoom": {api.NewNotifyRoom{}, api.NotifyRoom{}}, "removeNotifyRoom": {}, "testNotifyRoom": {nil, api.NotifyTest{}},
	"listNotifyDevices": {nil, api.NotifyDeviceList{}}, "removeNotifyDevice": {},
	"getSlackLink": {nil, api.SlackAccount{}}, "linkSlack": {api.NewSlackLink{}, api.SlackAccount{}}, "lookUpSlack": {api.SlackCode{}, api.SlackAccount{}}, "unlinkSlack": {},
	"listApprovals": {nil, api.ApprovalList{}}, "listComments": {nil, api.CommentList{}}, "comment": {api.NewComment{}, api.Comment{}}, "editAction": {api.Edit{}, api.Action{}},
	"listRevisions": {nil, api.RevisionList{}}, "resolveAction": {api.Resolution{}, api.Action{}}, "cancelAction": {nil, api.Action{}},
	"listSwitches": {nil, api.SwitchList{}}, "switchOn": {api.NewSwitch{}, api.Switch{}}, "switchOff": {},
	"listRecipients": {nil, api.DeliveryList{}}, "countSuppressed": {nil, api.SuppressionCounts{}}, "suppress": {api.Address{}, nil}, "lookUpSuppressed": {api.Address{}, api.Suppression{}},
	"unsuppress": {api.Address{}, nil}, "listSuspensions": {nil, api.SuspensionList{}}, "liftSuspension": {api.Lift{}, nil},
	"listSigningDomains": {nil, api.SigningDomainList{}}, "listSigningKeys": {nil, api.SigningKeyList{}}, "rotateSigningKeys": {nil, api.SigningKeyList{}},
	"checkSigningKeys": {nil, api.SigningKeyList{}}, "removeSigningKey": {},
	"listAudit": {nil, api.AuditList{}}, "getCheckpoint": {nil, api.Checkpoint{}}, "makeCheckpoint": {nil, api.Checkpoint{}}, "getProof": {nil, api.Proof{}},
	"listReaches": {nil, api.NotifyStatus{}}, "testNotify": {api.NamedPerson{}, api.NotifyTestList{}}, "telegramCode": {api.NamedPerson{}, api.TelegramCode{}}, "telegramUnlink": {},
	"listConnectCodes": {nil, api.ConnectCodeList{}}, "createConnectCode": {api.NewConnectCode{}, api.ConnectCode{}}, "withdrawConnectCode": {}, "connect": {api.Connect{}, api.Connected{}},
	"listAccounts": {nil, api.AccountList{}}, "createAccount": {api.NewAccount{}, api.Account{}},
	"beginSession": {api.SignIn{}, api.Session{}}, "showSession": {nil, api.Session{}}, "endSession": {}, "stepUp": {api.StepUp{}, api.Session{}},
	"listPeople": {nil, api.PersonList{}}, "listInvitations": {nil, api.InvitationList{}}, "invitePerson": {api.NewInvitation{}, api.Invitation{}}, "withdrawInvitation": {},
	"changePerson": {api.PersonChange{}, nil}, "disablePerson": {}, "enablePerson": {}, "resetPerson": {}, "linkOperator": {}, "unlinkOperator": {}, "renewPassword": {nil, api.Invitation{}},
	"beginVerification": {api.NewVerification{}, api.Verification{}}, "endVerification": {api.VerificationResult{}, nil},
	"getProblem": {nil, api.ProblemKind{}},
}

// others are operations whose JSON is none of ours, or that have none.
func others(id string) bool {
	return strings.HasPrefix(id, "lobster") || slices.Contains([]string{
		"getOpenAPI", "getOpenAPIJSON", "askUnsubscribe", "unsubscribe", "followInbox", "exportInbox", "getRawMessage", "getAttachment", "getDraftAttachment", "openActionFile",
	}, id)
}

// lobsterFields are read by LobsterMail's client; the server adds them.
var lobsterFields = map[string][]string{
	"Inbox":      {"displayName", "domain", "isActive", "emailCount", "expiresAt", "createdAt"},
	"InboxList":  {"data"},
	"NewInbox":   {"localPart", "domain", "displayName"},
	"Domain":     {"status", "dnsRecords"},
	"ThreadList": {"data", "hasMore", "cursor"},
	"FullThread": {"inboxId", "subject", "emailCount", "lastEmailAt", "createdAt", "emails"},
}

// unwelcome are fields that a type has because it embeds another, and that the
// server refuses or ignores there.
var unwelcome = map[string][]string{"Reply": {"to", "in_reply_to", "bulk"}}

// shared are fields that one request needs and another with the same type does
// not.
var shared = []string{"NewGrant.expires_at", "WebhookChange.url"}

type object = map[string]any

// TestTypesAreTheDescribedOnes compares the types of every operation with the
// schemas of docs/openapi.yaml, field by field.
func TestTypesAreTheDescribedOnes(t *testing.T) {
	d := read(t)
	seen := map[string]bool{}
	for path, item := range d.doc["paths"].(object) {
		for _, op := range item.(object) {
			op, ok := op.(object)
			if !ok {
				continue // parameters of the path
			}
			id := op["operationId"].(string)
			w, ok := operations[id]
			if !ok && !others(id) {
				t.Errorf("%s (%s) has no types", id, path)
			}
			if !ok {
				continue
			}
			seen[id] = true
			d.compare(t, id+" request", reflect.TypeOf(w.in), d.schema(op["requestBody"]), true)
			for status, resp := range op["responses"].(object) {
				if strings.HasPrefix(status, "2") {
					d.compare(t, id+" answer", reflect.TypeOf(w.out), d.schema(resp), false)
				}
			}
		}
	}
	for id := range operations {
		if !seen[id] {
			t.Errorf("docs/openapi.yaml has no operation %s", id)
		}
	}
	for field := range d.undescribed {
		if !d.described[field] {
			t.Errorf("%s is in no answer of docs/openapi.yaml", field)
		}
	}
	d.compare(t, "Problem", reflect.TypeFor[api.Problem](), d.deref(object{"$ref": "#/components/schemas/Problem"}), false)
}

// TestConstantsAreTheDescribedOnes compares the constants of a typed field with
// the values that its schema lists.
func TestConstantsAreTheDescribedOnes(t *testing.T) {
	d := read(t)
	for _, tt := range []struct {
		schema, field string
		want          []any
	}{
		{"Mode", "", []any{api.ModeReadOnly, api.ModeGatedAll, api.ModeGatedSend, api.ModeMonitored, api.ModeAutonomous}},
		{"Action", "state", []any{api.StateScheduled, api.StatePending, api.StateDenied, api.StateApproved, api.StateExecuting, api.StateDone, api.StateFailed, api.StateUnknown, api.StateCancelled}},
		{"Scope", "", []any{api.ScopeRead, api.ScopeDraft, api.ScopeSend, api.ScopePropose, api.ScopeFull, api.ScopeRecover}},
		{"Part", "kind", []any{api.CredentialKey, api.CredentialGrant, api.CredentialRecovery}},
		{"Message", "direction", []any{api.DirectionIn, api.DirectionOut}},
		{"Compose", "gate_timing", []any{api.GateFirst, api.ScheduleFirst}},
		{"RecipientState", "state", []any{api.DeliveryQueued, api.DeliverySending, api.DeliveryDelivered, api.DeliveryDeferred, api.DeliveryBounced, api.DeliverySuppressed, api.DeliveryUncertain, api.DeliveryCancelled}},
		{"DomainState", "", []any{api.DomainPending, api.DomainVerified, api.DomainDegraded, api.DomainLost}},
		{"Verdict", "effect", []any{api.Allow, api.Ask, api.Deny}},
		{"Switch", "scope", []any{api.SwitchInbox, api.SwitchCapability, api.SwitchDomain, api.SwitchProject, api.SwitchEverything}},
		{"Person", "role", []any{api.RoleOwner, api.RoleReviewer, api.RoleViewer}},
		{"EventType", "", []any{
			api.EventInboxCreated, api.EventInboxDeleted, api.EventMessageReceived, api.EventMessageQuarantined, api.EventMessageSent, api.EventMessageDelivered,
			api.EventMessageDeferred, api.EventMessageBounced, api.EventMessageComplained, api.EventOversightPending, api.EventOversightApproved, api.EventOversightRejected,
			api.EventOversightCancelled, api.EventOversightExpired, api.EventOversightCommented, api.EventInboxModeChanged, api.EventSwitchOn, api.EventSwitchOff,
		}},
	} {
		s := d.deref(object{"$ref": "#/components/schemas/" + tt.schema})
		if tt.field != "" {
			s = d.deref(s["properties"].(object)[tt.field])
		}
		if got, want := fmt.Sprint(s["enum"]), fmt.Sprint(tt.want); got != want {
			t.Errorf("%s.%s: docs/openapi.yaml has %s, package api %s", tt.schema, tt.field, got, want)
		}
	}
}

type described struct {
	doc object

	// Fields by type and member, such as "Inbox.key": those that the answers of
	// some operations leave out, and those that are described.
	undescribed, described map[string]bool
}

func read(t *testing.T) described {
	t.Helper()
	var doc object
	if err := yaml.Unmarshal(docs.OpenAPI, &doc); err != nil {
		t.Fatal(err)
	}
	return described{doc, map[string]bool{}, map[string]bool{}}
}

// schema returns the schema of the JSON of a request body or an answer, or nil.
func (d described) schema(v any) object {
	content, _ := d.deref(v)["content"].(object)
	media, _ := content["application/json"].(object)
	return d.deref(media["schema"])
}

// deref resolves references and merges what allOf and oneOf (with null) hold.
func (d described) deref(v any) object {
	o, ok := v.(object)
	if !ok {
		return nil
	}
	out := object{}
	if ref, ok := o["$ref"].(string); ok {
		at := any(d.doc)
		for part := range strings.SplitSeq(strings.TrimPrefix(ref, "#/"), "/") {
			at = at.(object)[part]
		}
		out = d.deref(at)
	}
	merge := func(s object) {
		for k, v := range s {
			switch k {
			case "properties":
				props := object{}
				if old, ok := out[k].(object); ok {
					maps.Copy(props, old)
				}
				maps.Copy(props, v.(object))
				out[k] = props
			case "required":
				if list, ok := v.([]any); ok { // a request body's is a boolean
					old, _ := out[k].([]any)
					out[k] = append(slices.Clone(old), list...)
				}
			case "$ref", "allOf", "oneOf", "anyOf":
			default:
				out[k] = v
			}
		}
	}
	out = maps.Clone(out)
	for _, k := range []string{"allOf", "oneOf", "anyOf"} {
		list, _ := o[k].([]any)
		for _, part := range list {
			s := d.deref(part)
			if s["type"] == "null" {
				out["nullable"] = true
				continue
			}
			merge(s)
		}
	}
	merge(o)
	return out
}

// compare fails unless a type has exactly the members of a schema, of the same
// kinds, and leaves out none that the schema requires.
func (d described) compare(t *testing.T, name string, typ reflect.Type, s object, request bool) {
	t.Helper()
	if (typ == nil) != (s == nil) {
		t.Errorf("%s: the type is %v, and the schema %v", name, typ, s)
	}
	if typ == nil || s == nil {
		return
	}
	kinds, nullable := kindsOf(s)
	if typ.Kind() == reflect.Pointer {
		if !nullable && !request {
			t.Errorf("%s: is a pointer, and docs/openapi.yaml does not say that it may be null", name)
		}
		typ = typ.Elem()
	} else if nullable && !request && typ != reflect.TypeFor[json.RawMessage]() {
		t.Errorf("%s: may be null, and is no pointer", name)
	}
	want := kindOf(typ)
	if want != "any" && len(kinds) > 0 && !slices.Contains(kinds, want) {
		t.Errorf("%s: is %v, and docs/openapi.yaml says %v", name, typ, kinds)
	}
	switch {
	case typ == reflect.TypeFor[time.Time]():
		if s["format"] != "date-time" {
			t.Errorf("%s: is a time, and docs/openapi.yaml does not say date-time", name)
		}
	case want == "array":
		d.compare(t, name+"[]", typ.Elem(), d.deref(s["items"]), request)
	case want == "object" && typ.Kind() == reflect.Struct:
		d.members(t, name, typ, s, request)
	}
}

func (d described) members(t *testing.T, name string, typ reflect.Type, s object, request bool) {
	t.Helper()
	props, _ := s["properties"].(object)
	required, _ := s["required"].([]any)
	got := map[string]bool{}
	for _, f := range reflect.VisibleFields(typ) {
		tag, ok := f.Tag.Lookup("json")
		if !ok {
			continue // embedded
		}
		member, options, _ := strings.Cut(tag, ",")
		got[member] = true
		p, ok := props[member]
		optional := options != ""
		// What only some are shown (an embedded pointer) may be missing.
		sometimes := len(f.Index) > 1 && typ.Field(f.Index[0]).Type.Kind() == reflect.Pointer
		if !ok && !request && (optional || sometimes) { // other operations answer with it
			d.undescribed[typ.Name()+"."+member] = true
			continue
		}
		d.described[typ.Name()+"."+member] = true
		if !ok && slices.Contains(unwelcome[typ.Name()], member) {
			continue
		}
		if !ok {
			t.Errorf("%s: %s.%s is not in docs/openapi.yaml", name, typ.Name(), member)
			continue
		}
		m := d.deref(p)
		ft := f.Type
		if optional && ft.Kind() == reflect.Pointer {
			ft = ft.Elem() // nil leaves it out
		}
		d.compare(t, name+"."+member, ft, m, request)
		if !request && !sometimes && !optional && !slices.Contains(required, any(member)) && typ != reflect.TypeFor[api.SendLimits]() {
			t.Errorf("%s.%s: is always there, and docs/openapi.yaml does not require it", name, member)
		}
		if request && optional && !slices.Contains(shared, typ.Name()+"."+member) && slices.Contains(required, any(member)) {
			t.Errorf("%s.%s: may be left out, and docs/openapi.yaml requires it", name, member)
		}
	}
	for member := range props {
		if !got[member] && !slices.Contains(lobsterFields[typ.Name()], member) {
			t.Errorf("%s: %s has no field for %s", name, typ.Name(), member)
		}
	}
}

func kindsOf(s object) (kinds []string, nullable bool) {
	nullable, _ = s["nullable"].(bool)
	switch v := s["type"].(type) {
	case string:
		kinds = []string{v}
	case []any:
		for _, k := range v {
			if k == "null" {
				nullable = true
			} else {
				kinds = append(kinds, k.(string))
			}
		}
	}
	return kinds, nullable
}

// kindOf is the JSON type of a Go type, or "any".
func kindOf(t reflect.Type) string {
	switch {
	case t == reflect.TypeFor[time.Time]():
		return "string"
	case t == reflect.TypeFor[json.RawMessage]():
		return "any"
	}
	switch t.Kind() { //nolint:exhaustive // the kinds that the types have
	case reflect.String:
		return "string"
	case reflect.Bool:
		return "boolean"
	case reflect.Int, reflect.Int64, reflect.Uint64:
		return "integer"
	case reflect.Float64:
		return "number"
	case reflect.Slice:
		return "array"
	case reflect.Interface:
		return "any"
	}
	return "object"
}
