package connection

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"strconv"
	"time"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// A Destination is what a person lets a sandbox connect to: the payload of the
// action.
type Destination struct {
	Sandbox  string   `json:"sandbox"`
	Template string   `json:"template"`
	Hosts    []string `json:"hosts"` // names that it may be meant for, sorted; or its address
	Port     int      `json:"port"`
}

// String returns d as "name:443", for a person.
func (d Destination) String() string {
	var b bytes.Buffer
	for i, h := range d.Hosts {
		if i > 0 {
			b.WriteString(" or ")
		}
		b.WriteString(net.JoinHostPort(h, strconv.Itoa(d.Port)))
	}
	return b.String()
}

// request is what policy is asked about a connection. To has all its hosts: where
// several names share the address, a rule about one of them must match.
func request(who auth.Principal, d Destination) policy.Request {
	return policy.Request{
		Kind: policy.KindConnect, Via: "link", To: d.Hosts, Sandbox: who.ID, Template: who.Template, Time: time.Now(),
		Detail: map[string]string{"host": d.Hosts[0], "port": strconv.Itoa(d.Port)},
	}
}

var (
	_ oversight.Executor  = (*Admission)(nil)
	_ oversight.Recoverer = (*Admission)(nil)
)

// Execute implements [oversight.Executor]. It connects nothing: the held
// connection, or the next attempt, reads from the action's state that it may.
func (c *Admission) Execute(_ context.Context, a oversight.Action) oversight.Outcome {
	var d Destination
	if err := json.Unmarshal(a.Payload, &d); err != nil || len(d.Hosts) == 0 {
		return oversight.Outcome{State: oversight.Failed, Detail: "the payload cannot be read"}
	}
	return oversight.Outcome{State: oversight.Done, Detail: fmt.Sprintf("sandbox %s may connect to %s for %v", d.Sandbox, d, oversight.PassTime)}
}

// Interrupted implements [oversight.Recoverer]: an execution has no effect except
// its outcome, so it can be repeated.
func (c *Admission) Interrupted(context.Context, *store.Tx, oversight.Action) (oversight.Outcome, error) {
	return oversight.Outcome{State: oversight.Approved, Detail: "the program stopped before the approval took effect; it is tried again"}, nil
}

// Show implements [oversight.Executor].
func (c *Admission) Show(a oversight.Action) (oversight.View, error) {
	var d Destination
	unknown, err := oversight.ReadPayload(a.Payload, &d)
	if err != nil {
		return oversight.View{}, fmt.Errorf("read connection: %w", err)
	}
	v := oversight.View{
		Title:  "Connection to " + d.String(),
		Fields: []oversight.Field{{Name: "To", Value: d.String()}, {Name: "Sandbox", Value: d.Sandbox}, {Name: "Template", Value: d.Template}},
		Text:   fmt.Sprintf("If you approve it, code in this sandbox may connect there for %v, any number of times, and send and read anything.", oversight.PassTime),
	}
	if len(d.Hosts) > 1 {
		v.Notes = append(v.Notes, "these names share one address; which of them is meant is not known")
	}
	var rows []oversight.PanelRow
	for i, h := range d.Hosts {
		row := oversight.PanelRow{Name: "Host", Value: h, Note: "port " + strconv.Itoa(d.Port), Field: "To"}
		if name := portNames(d.Port); name != "" {
			row.Note += ", usually " + name
		}
		if i > 0 {
			row.Name, row.Field = "or", "Host"
		}
		rows = append(rows, row)
	}
	v.AddPanel("Where it connects", oversight.FormHosts, "", rows...)
	v.AddPanel("What opens", oversight.FormFacts, "",
		oversight.PanelRow{Name: "Allows", Value: "any number of connections to this host and port, with any protocol. Code may send and read anything there.", Warn: true},
		oversight.PanelRow{Name: "Sandbox", Value: d.Sandbox, Note: "this sandbox alone"},
		oversight.PanelRow{Name: "Template", Value: d.Template},
		oversight.PanelRow{Name: "Until", Value: fmt.Sprintf("%.0f minutes after the approval", oversight.PassTime.Minutes()), Note: "a kill switch or a rule that denies ends it sooner"},
	)
	v.InPanel = true
	v.Unknown(unknown)
	return v, nil
}

// portNames returns the protocol that servers on a port usually speak; it is empty if
// there is none. It says nothing about what code sends there.
func portNames(port int) string {
	return map[int]string{22: "SSH", 25: "mail", 53: "DNS", 80: "HTTP without encryption", 443: "HTTPS", 465: "mail", 587: "mail", 1433: "SQL Server", 3306: "MySQL", 5432: "PostgreSQL", 6379: "Redis", 27017: "MongoDB"}[port]
}
