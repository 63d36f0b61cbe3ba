package api

import "time"

// NotifySettings are when a person is notified.
type NotifySettings struct {
	Zone           string   `json:"zone"`            // IANA time zone; empty means UTC
	QuietFrom      string   `json:"quiet_from"`      // quiet hours begin, "22:00"; empty means that there are none
	QuietTo        string   `json:"quiet_to"`        // they end, "07:30"; before QuietFrom means on the next day
	QuietDays      []string `json:"quiet_days"`      // on which they begin, "monday"; empty means every day
	Silent         bool     `json:"silent"`          // what is grave waits for their end too
	CollectMinutes int      `json:"collect_minutes"` // for which what is not grave is collected into one message; 0 means none
	Detail         bool     `json:"detail"`          // push messages name inbox and recipients' domains
}

// ProjectNotifySettings are those of people without own ones, and whom to tell when
// nobody has decided. Nothing is ever approved by waiting.
type ProjectNotifySettings struct {
	NotifySettings

	EscalateMinutes int      `json:"escalate_minutes"` // 0 means nobody is told
	EscalateTo      []string `json:"escalate_to"`      // "person:ann", "role:owner", "room:rom_…"
}

// NotifySettingsStatus is the settings of the caller and of the project.
type NotifySettingsStatus struct {
	Settings NotifySettings        `json:"settings"` // those that count for the caller
	Own      bool                  `json:"own"`      // they are the caller's own; else the project's
	Project  ProjectNotifySettings `json:"project"`
}

// A NotifyRoom is a channel in Slack or Teams that gets the project's notices. Nothing
// shows its credentials.
type NotifyRoom struct {
	ID        string    `json:"id"`
	Kind      string    `json:"kind"` // slack or teams
	Name      string    `json:"name"`
	Channel   string    `json:"channel"` // Slack's ID; empty for Teams
	CreatedAt time.Time `json:"created_at"`
	CreatedBy string    `json:"created_by"` // a principal
	Failed    string    `json:"failed"`     // why the newest message could not be sent; may be empty
}

// A NotifyRoomList is the rooms of a project, by name.
type NotifyRoomList struct {
	Rooms []NotifyRoom `json:"rooms"`
}

// A NewNotifyRoom sets up a room. Its credentials are stored encrypted and never shown.
type NewNotifyRoom struct {
	Kind          string `json:"kind"`
	Name          string `json:"name"`
	Channel       string `json:"channel,omitempty"`        // of Slack: "C0123456789"
	Token         string `json:"token,omitempty"`          // of Slack: the bot's, "xoxb-…"; secret
	SigningSecret string `json:"signing_secret,omitempty"` // of Slack: the app's; empty means that nobody decides there; secret
	URL           string `json:"url,omitempty"`            // of Teams: the workflow's; secret
}

// A SlackAccount is an account in Slack.
type SlackAccount struct {
	Name     string     `json:"name"` // as Slack called it then; its holder can change it
	Team     string     `json:"team"` // ID of the workspace; empty: none is linked
	User     string     `json:"user"`
	LinkedAt *time.Time `json:"linked_at"` // nil: it is not linked
}

// A SlackCode is a code that Slack showed to the holder of an account.
type SlackCode struct {
	Code string `json:"code"` // secret
}

// A NewSlackLink links the account of a code to the caller. Team and User are those that
// the lookup of the code named.
type NewSlackLink struct {
	Code string `json:"code"` // secret
	Team string `json:"team"`
	User string `json:"user"`
}

// A NotifyDevice is a browser of the caller that gets push messages.
type NotifyDevice struct {
	ID        string     `json:"id"`
	Name      string     `json:"name"` // what the browser said of itself
	Host      string     `json:"host"` // of the push service
	CreatedAt time.Time  `json:"created_at"`
	SentAt    *time.Time `json:"sent_at"` // of the newest message; nil: none
	Failed    string     `json:"failed"`  // why the newest one could not be sent; may be empty
}

// A NotifyDeviceList is the browsers of the caller, the newest first.
type NotifyDeviceList struct {
	Devices []NotifyDevice `json:"devices"`
}
