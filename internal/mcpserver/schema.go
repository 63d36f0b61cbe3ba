package mcpserver

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"

	"github.com/google/jsonschema-go/jsonschema"
)

// The schemas of arguments teach: they are the first, and often the only, thing
// that an agent reads about a tool. What they promise is checked in the tools,
// whose messages name the field and the limit without repeating a huge value.
// What a tool answers is described by the type that it answers with.

// The properties that several tools have.
const (
	inboxProperty = `"inbox": {"type": "string", "maxLength": 320, "description": "Only for a key over several inboxes: the id or address of the one meant. Left out: your own."}`
	limitProperty = `"limit": {"type": "integer", "default": 10, "description": "How many, newest first: 1 to 50. A larger number counts as 50. The answer says whether there are more."}`
	messageID     = `"id": {"type": "string", "description": "The id of a message, msg_…, as email_inbox lists it."}`
	answeredID    = `"messageId": {"type": "string", "description": "The id of the message that is meant, msg_…, as email_inbox lists it."}`
	toProperty    = `"to": {"type": "array", "items": {"type": "string"}, "maxItems": 50, "description": "Recipients: \"bob@example.com\" or \"Bob <bob@example.com>\". At most 50 together with cc and bcc."}`
	subject       = `"subject": {"type": "string", "maxLength": 998, "description": "One line, at most 998 characters."}`
	body          = `"body": {"type": "string", "maxLength": 262144, "description": "The text, or with html=true an HTML fragment. At most 262144 characters."}`
	actionIDs     = `"actionId": {"type": "string", "description": "The actionId, act_…, that email_send, email_reply or email_forward returned."},
    "approvalId": {"type": "string", "description": "The same id under its other name; give one of the two."}`
	draftID = `"draftId": {"type": "string", "description": "The id of a draft, drf_…, as email_draft_list lists it."}`

	// contentProperties are those of all tools that write a mail.
	contentProperties = `"cc": {"type": "array", "items": {"type": "string"}, "maxItems": 50, "description": "Recipients of a copy."},
    "bcc": {"type": "array", "items": {"type": "string"}, "maxItems": 50, "description": "Recipients of a copy that the other recipients do not see. The person who approves sees them."},
    "html": {"type": "boolean", "default": false, "description": "Whether body is an HTML fragment (without html and body tags; it is wrapped)."},
    "markdown": {"type": "boolean", "default": false, "description": "Whether body is Markdown: it is sent as it is and, for who reads HTML, rendered."},
    "attachments": {
      "type": "array",
      "maxItems": 100,
      "description": "Files to attach, at most 25 MB together. Inside a sandbox: paths of files in this sandbox, \"/home/user/report.csv\". Anywhere: objects with the content.",
      "items": {
        "anyOf": [
          {"type": "string", "description": "A path in this sandbox, readable by the user named user."},
          {
            "type": "object",
            "properties": {
              "name": {"type": "string", "description": "The file's name, without any folder."},
              "content_base64": {"type": "string", "description": "The file's content in base64."},
              "content_type": {"type": "string", "description": "Its media type, \"text/csv\"; left out: application/octet-stream."}
            },
            "required": ["name", "content_base64"],
            "additionalProperties": false
          }
        ]
      }
    },
    ` + inboxProperty

	// timingProperties say when what is proposed leaves.
	timingProperties = `"sendAt": {"type": "string", "format": "date-time", "description": "Leave no sooner than this time, \"2026-01-31T09:00:00Z\". Left out: as soon as it is approved."},
    "gateTiming": {"type": "string", "enum": ["gate_first", "schedule_first"], "default": "gate_first", "description": "With sendAt: ask a person now (gate_first) or only when the time has come (schedule_first)."},
    "undoSeconds": {"type": "integer", "minimum": 0, "maximum": 120, "description": "For how long after the approval email_cancel still takes it back. Left out: what the inbox is set to."},
    "allowDuplicate": {"type": "boolean", "default": false, "description": "Say that the same email as a moment ago is meant to be sent once more: a person is then asked."}`

	// keyProperty is of tools that can be called again after an answer was lost.
	keyProperty = `"idempotencyKey": {"type": "string", "maxLength": 255, "description": "A name of yours for this call. If you do not know whether a call has worked, make it again with the same key: it is done once."}`

	// An answer shows the thread of what it answers, other mail the one that it names.
	showThis   = `"showThread": {"type": "boolean", "default": false, "description": "Show the thread of that message to the person who approves, who cannot read your inbox. It does not leave."}`
	showThread = `"showThread": {"type": "string", "description": "The id of a thread, thr_…, or of one of its messages, msg_…: show it to the person who approves, who cannot read your inbox. It does not leave."}`

	bulkProperty = `"bulk": {"type": "boolean", "default": false, "description": "Whether it is bulk mail, such as a newsletter: it then tells its one recipient how to get no more of it."}`
)

// object returns the schema of arguments with properties; required are the
// names, between spaces, of those that must be there.
func object(required string, properties ...string) json.RawMessage {
	names, err := json.Marshal(append([]string{}, strings.Fields(required)...))
	if err != nil { // unreachable: they are strings
		panic(err)
	}
	return json.RawMessage(fmt.Sprintf(`{"type": "object", "properties": {%s}, "required": %s, "additionalProperties": false}`, strings.Join(properties, ", "), names))
}

// answerOf returns the schema of what T looks like as JSON.
func answerOf[T any]() *jsonschema.Schema {
	s, err := jsonschema.For[T](nil)
	if err != nil {
		panic(fmt.Sprintf("describe %v: %v", reflect.TypeFor[T](), err)) // unreachable: a test looks at every tool
	}
	return s
}
