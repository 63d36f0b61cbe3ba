package mailapi

import (
	"net/http"

	"postern/internal/api"
	"postern/internal/command"
)

// A commandServer serves the records of what was started in sandboxes.
type commandServer struct {
	commands *command.Admission // nil: the server keeps none
}

func (s commandServer) routes() []route {
	return offeredIf(s.commands != nil, "commands", []route{{"GET", "/v1/sandboxes/{id}/commands", 0, s.get}})
}

func (s commandServer) get(w http.ResponseWriter, r *http.Request, c caller) error {
	q := r.URL.Query()
	if err := onlyParameters(q, "limit"); err != nil {
		return err
	}
	most, err := limit(q, 100, 1000)
	if err != nil {
		return err
	}
	rec, err := s.commands.Read(r.Context(), c.Principal, r.PathValue("id"))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, sandboxCommands(rec, most))
	return nil
}

// sandboxCommands returns a record with its newest commands.
func sandboxCommands(r command.Record, most int) api.SandboxCommands {
	out := api.SandboxCommands{
		Sandbox: r.Sandbox, Contract: r.Contract, Started: r.Started, Refused: r.Refused, Held: r.Held, Exited: r.Exited, Missed: r.Missed, Programs: r.Programs,
		Events: r.Lines, SHA256: r.SHA256, Complete: r.Complete, Dropped: r.Dropped, Ended: r.Ended, Commands: []api.SandboxCommand{}, Ordered: r.Ordered, Orders: []api.SandboxOrder{},
	}
	if out.Programs == nil {
		out.Programs = map[string]uint64{}
	}
	for _, c := range r.Commands[max(0, len(r.Commands)-most):] {
		s := api.SandboxCommand{
			Time: c.Time, PID: int(c.PID), Parent: int(c.Parent), Path: c.Path, Name: c.Name, Dir: c.Dir, Args: c.Args, Exact: c.Exact, SHA256: c.SHA256, Fixed: c.Fixed, UID: int(c.UID),
			Verdict: string(c.Verdict), Why: c.Why, Action: c.Action, Ended: c.Ended, Duration: c.Duration().Microseconds(), Signal: c.Signal, Prepared: c.Prepared,
		}
		if s.Args == nil {
			s.Args = []string{}
		}
		if c.Exited {
			s.Exit = &c.Code
		}
		out.Commands = append(out.Commands, s)
	}
	orders := r.Orders[max(0, len(r.Orders)-most):]
	for i := range orders {
		o := &orders[i]
		s := api.SandboxOrder{
			Time: o.Time, Via: string(o.Via), Op: string(o.Op), Args: o.Args, Exact: o.Exact, Dir: o.Dir, User: o.User, Tag: o.Tag, PID: int(o.PID), Path: o.Path, To: o.To, Lang: o.Language,
			SHA256: o.SHA256, Stdout: o.Stdout, Stderr: o.Stderr, Done: o.Done,
		}
		if o.Size >= 0 {
			s.Size = &o.Size
		}
		out.Orders = append(out.Orders, s)
	}
	return out
}
