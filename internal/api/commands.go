package api

import "time"

// SandboxCommands is the record of the programs that were started in a sandbox, as its
// kernel and the server saw them. Its texts come from the sandbox and are hostile.
type SandboxCommands struct {
	Sandbox  string            `json:"sandbox"`            // ID
	Contract string            `json:"contract,omitempty"` // that binds it, "name@sha256:…"
	Started  uint64            `json:"started"`
	Refused  uint64            `json:"refused"`
	Held     uint64            `json:"held"` // starts that waited for a person
	Exited   uint64            `json:"exited"`
	Missed   uint64            `json:"missed"`   // events that were lost
	Programs map[string]uint64 `json:"programs"` // starts by the name of the program's file; at most 200, the rest under "(other)"
	Events   uint64            `json:"events"`   // number of events in the record
	SHA256   string            `json:"sha256"`   // of all events, in hexadecimal
	Complete bool              `json:"complete"` // every event is in the counts and the digest
	Dropped  uint64            `json:"dropped"`  // events in the middle that are counted but no longer stored
	Ended    bool              `json:"ended"`    // the sandbox has ended, and these counts are in the audit

	Commands []SandboxCommand `json:"commands"` // the newest, in the order of their starts

	Ordered uint64         `json:"ordered"` // what clients had the sandbox do, in all
	Orders  []SandboxOrder `json:"orders"`  // the newest, in order
}

// A SandboxOrder is what a client had a sandbox do, as the server saw it before the sandbox
// did. Commands are what came of it.
type SandboxOrder struct {
	Time time.Time `json:"time"`
	Via  string    `json:"via,omitempty"` // sdk, mcp or console; absent for input
	Op   string    `json:"op"`            // run, terminal, code, input, signal, read, write, compose, mkdir, move or remove

	Args  []string `json:"args,omitempty"`     // of run and terminal, and the signal; at most 4 KiB, secrets masked
	Exact bool     `json:"exact"`              // args is exactly what was ordered
	Dir   string   `json:"dir,omitempty"`      // as the client wrote it; absent means the user's home
	User  string   `json:"user,omitempty"`     // as the client wrote it; absent means the default user
	Tag   string   `json:"tag,omitempty"`      // the client's name of the process; of code that of the context
	PID   int      `json:"pid,omitempty"`      // of the process; absent if it is not known
	Path  string   `json:"path,omitempty"`     // of files, as the client wrote it; several are on lines of their own
	To    string   `json:"to,omitempty"`       // where a file goes
	Lang  string   `json:"language,omitempty"` // of code, as the client wrote it

	Size   *int64 `json:"size,omitempty"`   // of code, input or a file, in bytes; absent if it is not known
	SHA256 string `json:"sha256,omitempty"` // of code, or of input where the policy asks for it, in hexadecimal
	Stdout int64  `json:"stdout,omitempty"` // bytes that the client got; of code all of the answer
	Stderr int64  `json:"stderr,omitempty"`
	Done   bool   `json:"done"` // the sizes are final
}

// A SandboxCommand is a start of a program in a sandbox.
type SandboxCommand struct {
	Time    time.Time `json:"time"`
	PID     int       `json:"pid"`
	Parent  int       `json:"parent"`
	Path    string    `json:"path"`             // of the file, with symbolic links resolved
	Name    string    `json:"name"`             // as the caller wrote it
	Dir     string    `json:"dir"`              // working directory
	Args    []string  `json:"args"`             // at most 4 KiB, secrets masked
	Exact   bool      `json:"exact"`            // args is exactly what the program got
	SHA256  string    `json:"sha256,omitempty"` // of the file, in hexadecimal; empty if not known
	Fixed   bool      `json:"fixed"`            // the file is the template's
	UID     int       `json:"uid"`
	Verdict string    `json:"verdict"`          // allowed, refused or held
	Why     string    `json:"why,omitempty"`    // why it was refused, or what allowed it
	Action  string    `json:"action,omitempty"` // that asked a person

	Ended    time.Time `json:"ended,omitzero"`
	Duration int64     `json:"duration_us,omitempty"` // microseconds, if it has ended
	Exit     *int      `json:"exit,omitempty"`        // exit code; absent while it runs, or if the process has executed another program
	Signal   int       `json:"signal,omitempty"`      // that ended it
	Prepared bool      `json:"prepared,omitempty"`    // a prepared shell ran it: args is what the client ordered
}
