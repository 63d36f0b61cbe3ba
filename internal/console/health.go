package console

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/domain"
	"postern/internal/store"
)

// A healthRow is one check of the server's health.
type healthRow struct {
	Tone string // good, warn, bad, or empty: not known
	Text string
	Hint string
	Said string // text beside it
	Link string // address of a page that helps, or empty
	Do   string // text of the link
}

// Symbol returns the symbol of the check.
func (h healthRow) Symbol() string {
	switch h.Tone {
	case "good":
		return "check"
	case "warn":
		return "warn"
	case "bad":
		return "x"
	}
	return "minus"
}

// health returns the checks of the server's health that a member of the project may see.
func (s overviewHandlers) health(ctx context.Context, tx *store.Tx, who auth.Principal) (out []healthRow, err error) {
	k, err := auditHandlers{s.Server}.kept(ctx, tx)
	if err != nil {
		return nil, err
	}
	switch {
	case k.Failed != "" || k.Wait != "":
		out = append(out, healthRow{"bad", "The record has a problem", or(k.Failed, k.Wait), "", "/console/audit", "Look"})
	case k.Any:
		out = append(out, healthRow{"good", "Record, checkpoint signed", "", ago(time.Since(k.Newest.At)), "", ""})
	default:
		out = append(out, healthRow{"", "No checkpoint is signed yet", "", "", "/console/audit", "Record"})
	}
	on, err := s.gate.SwitchesOf(ctx, tx, who.Project)
	if err != nil {
		return nil, err
	}
	if n := len(on); n > 0 {
		out = append(out, healthRow{"warn", count(n, "kill switch is on", "kill switches are on"), on[0].String(), "", "/console/switches", "Switches"})
	}
	recent := func(verb audit.Verb) (at time.Time, err error) {
		e, err := audit.List(ctx, tx, audit.Query{Project: who.Project, Verb: string(verb), Limit: 1, After: max(k.Size-50_000, 0)})
		if err != nil || len(e) == 0 {
			return at, err
		}
		return e[0].At, nil
	}
	for _, c := range []struct {
		verb, bad  audit.Verb
		well, none string
		failed     string
	}{
		{audit.ActionDone, audit.ActionFailed, "Mail and actions are carried out", "Nothing was carried out yet", "The last action failed"},
		{audit.MessageReceive, audit.MessageQuarantine, "Mail arrives", "No mail has arrived yet", ""},
		{audit.SandboxRunning, audit.SandboxFailed, "Sandboxes start", "No sandbox was started yet", "The last sandbox did not start"},
	} {
		good, err := recent(c.verb)
		if err != nil {
			return nil, err
		}
		bad, err := recent(c.bad)
		if err != nil {
			return nil, err
		}
		switch {
		case c.failed != "" && bad.After(good):
			out = append(out, healthRow{"warn", c.failed, "", ago(time.Since(bad)), "/console/audit?verb=" + string(c.bad), "Look"})
		case good.IsZero():
			out = append(out, healthRow{"", c.none, "", "", "", ""})
		default:
			out = append(out, healthRow{"good", c.well, "", ago(time.Since(good)), "", ""})
		}
	}
	return out, nil
}

// backupAge is the age from which a backup counts as old.
const backupAge = 7 * 24 * time.Hour

// withBackup adds a row with the age of the newest backup. Only backups of "postern backup"
// are known. With PostgreSQL, pg_dump makes the backups, so the overview has no such row.
func (s overviewHandlers) withBackup(ctx context.Context, tx *store.Tx, rows []healthRow) ([]healthRow, error) {
	if s.db.Concurrent() {
		return rows, nil
	}
	// A backup covers all projects. The record's index of objects finds its entry.
	last, err := audit.List(ctx, tx, audit.Query{Object: audit.Database, Verb: string(audit.RecordBackup), Limit: 1})
	if err != nil {
		return nil, err
	}
	if len(last) == 0 {
		return append(rows, healthRow{"", "No backup was made yet", "“postern backup FILE” copies the database.", "", "", ""}), nil
	}
	row := healthRow{"good", "Backup of the database", "", ago(time.Since(last[0].At)), "", ""}
	if time.Since(last[0].At) > backupAge {
		row.Tone, row.Text, row.Hint = "warn", "The last backup is old", "“postern backup FILE” makes a new one."
	}
	return append(rows, row), nil
}

// shownDomains is how many domains with a problem the overview names.
const shownDomains = 3

// withDomains adds the results of the last DNS checks of the project's own domains.
func (s overviewHandlers) withDomains(ctx context.Context, who auth.Principal, rows []healthRow) ([]healthRow, error) {
	all, err := s.domains.Domains(ctx, who)
	if err != nil || len(all) == 0 {
		return rows, err
	}
	var bad []healthRow
	for _, d := range all {
		records, err := s.domains.Records(ctx, d)
		if err != nil {
			return nil, err
		}
		if row, ok := domainHealth(d, records); ok {
			bad = append(bad, row)
		}
	}
	if n := len(all) - len(bad); n > 0 {
		rows = append(rows, healthRow{"good", count(n, "domain is", "domains are") + " well: MX, SPF, DKIM", "", "", "/console/domains", "Domains"})
	}
	// The worst rows come first.
	slices.SortStableFunc(bad, func(a, b healthRow) int { return strings.Compare(a.Tone, b.Tone) })
	if len(bad) > shownDomains {
		more := healthRow{bad[shownDomains].Tone, count(len(bad)-shownDomains, "more domain has", "more domains have") + " a problem", "", "", "/console/domains", "Domains"}
		bad = append(bad[:shownDomains], more)
	}
	return append(rows, bad...), nil
}

// domainHealth returns a row that says what is wrong with a domain. bad is false if nothing
// is. Found and expected values are not shown: they are long, and the domain's page has them.
func domainHealth(d domain.Domain, records []domain.Record) (row healthRow, bad bool) {
	row = healthRow{"warn", d.Name, "", "", "/console/domains/" + d.ID, "Look"}
	var wrong []string
	for _, r := range records {
		switch r.Result {
		case domain.Missing, domain.Wrong, domain.Unreachable:
			if r.Need != domain.Optional {
				name, _, _ := strings.Cut(recordNames[r.Kind], ":")
				wrong = append(wrong, name+" "+resultNames[r.Result])
			}
		case domain.OK, domain.Warning, domain.Unchecked:
		}
	}
	switch d.State {
	case domain.StatePending:
		row.Text += " is not proved yet"
	case domain.StateLost:
		row.Tone, row.Text = "bad", d.Name+" is lost and sends nothing"
	case domain.StateDegraded:
		row.Text += " needs its records"
	case domain.StateVerified:
		if len(wrong) == 0 {
			return row, false
		}
	}
	// A domain can have several DKIM keys: the same result is named once.
	slices.Sort(wrong)
	row.Hint = strings.Join(slices.Compact(wrong), ", ")
	return row, true
}

// diskHealth returns the row that links to the disk page. With shown, the row also says how
// full the disk is.
func diskHealth(d diskState, shown bool) healthRow {
	row := healthRow{"", "Disk", "", "", "/console/disk", "Look"}
	if !shown || d.Total == 0 {
		return row
	}
	row.Tone, row.Text = "good", fmt.Sprintf("Disk, %d %% used", d.Percent())
	switch {
	case d.Percent() >= 95:
		row.Tone = "bad"
	case d.Percent() >= 85, d.Full > 0 && d.Full < 7*24*time.Hour:
		row.Tone = "warn"
	}
	if row.Tone != "good" && d.Full > 0 {
		row.Hint = "At this rate it is full in about " + howLong(d.Full) + "."
	}
	return row
}
