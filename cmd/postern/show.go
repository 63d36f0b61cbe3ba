package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"postern/internal/api"
)

// A shower shows the object with an ID.
type shower func(ctx context.Context, l *local, id string, out *output) error

// showers are the kinds of IDs that "postern show" knows, by their prefixes.
func (s *showTool) showers() map[string]shower {
	return map[string]shower{
		"act_": showAction,
		"ibx_": func(ctx context.Context, l *local, id string, out *output) error {
			return showInbox(ctx, l, []string{id}, out)
		},
		"msg_": s.message,
		"drf_": s.draft,
		"crd_": showCredential,
		"dlv_": showDelivery,
		"whk_": showHook,
		"vol_": showVolume,
		"dom_": showDomain,
		"swi_": showSwitch,
		"inv_": showInvitation,
	}
}

type showTool struct{ keyed }

func showCommand() *command {
	s := &showTool{}
	return &command{
		use: "show ID", short: "show anything in full by its ID", facts: true,
		long: `
Shows one object in full, whatever it is: an action (act_), an inbox (ibx_, or its
address), a sandbox, a message (msg_) or draft (drf_) of the inbox whose key is in
$POSTERN_INBOX_KEY, a webhook (whk_) or one of its deliveries (dlv_), a volume
(vol_), a domain (dom_), a grant or an account (crd_), a kill switch (swi_), an
invitation (inv_), or an entry of the record by its number.`,
		example: "postern show act_7LHV2BTBSXVYTLBKTZCSDM3VBI\npostern show analyst@agents.internal --json",
		flags:   s.flags,
		run: func(ctx context.Context, args []string, out *output) error {
			id, err := oneArg(args, "ID")
			if err != nil {
				return err
			}
			return s.show(ctx, id, out)
		},
	}
}

func (s *showTool) show(ctx context.Context, id string, out *output) error {
	on := func(f shower) error {
		return onServer(&s.conf, func(ctx context.Context, l *local, _ []string, out *output) error { return f(ctx, l, id, out) })(ctx, nil, out)
	}
	if seq, err := strconv.ParseInt(id, 10, 64); err == nil && seq > 0 {
		return (&auditing{conf: s.conf}).showEntry(ctx, seq, out)
	}
	if prefix, _, ok := strings.Cut(id, "_"); ok {
		if f, ok := s.showers()[prefix+"_"]; ok {
			return on(f)
		}
	}
	switch {
	case strings.Contains(id, "@"):
		return on(s.showers()["ibx_"])
	case len(id) >= 21 && id[0] == 'i' && !strings.Contains(id, "_"):
		return on(func(ctx context.Context, l *local, id string, out *output) error {
			return showSandbox(ctx, l, []string{id}, out)
		})
	}
	return fmt.Errorf("%w: %q is no ID that this command knows; postern help show lists their kinds", errUsage, id)
}

func showAction(ctx context.Context, l *local, id string, out *output) error {
	a, err := l.action(ctx, id)
	if err != nil {
		return err
	}
	if out.json {
		return out.object(a)
	}
	addresses, err := l.addresses(ctx)
	if err != nil {
		return err
	}
	printAction(out, a, addresses)
	var list api.DeliveryList
	if err := l.call(ctx, "GET", "/v1/actions/"+pathSegment(id)+"/deliveries", nil, &list); err != nil && !errors.Is(err, errNotFound) {
		return err
	}
	if len(list.Deliveries) == 0 {
		return nil
	}
	rows := [][]string{{"RECIPIENT", "STATE", "ATTEMPTS", "LAST", "NEXT", "DETAIL"}}
	for _, d := range list.Deliveries {
		rows = append(rows, []string{cell(d.Recipient), string(d.State), strconv.FormatInt(d.Attempts, 10), agoOrNever(d.LastAt), in(d.NextAt), cell(d.Detail)})
	}
	return out.table(rows)
}

// message shows a message of the inbox whose key the environment has. The
// operator, who opens no mail, sees what is known of a message in quarantine.
func (s *showTool) message(ctx context.Context, l *local, id string, out *output) error {
	if os.Getenv(keyVariable) != "" {
		return s.withKey(func(ctx context.Context, l *local, path string, _ []string, out *output) error {
			var m api.FullMessage
			if err := l.call(ctx, "GET", path+"/messages/"+pathSegment(id), nil, &m); err != nil {
				return noMessage(id, err)
			}
			return out.facts(m, func() error { return printMessage(out, m, false) })
		})(ctx, nil, out)
	}
	var list api.HeldList
	if err := l.call(ctx, "GET", "/v1/quarantine?limit=200", nil, &list); err != nil {
		return err
	}
	for _, h := range list.Held {
		if h.ID == id {
			return out.object(h)
		}
	}
	return fmt.Errorf("no message %q is in quarantine; the inbox's key shows others (export %s=pib_...)", id, keyVariable)
}

func (s *showTool) draft(ctx context.Context, _ *local, id string, out *output) error {
	return s.withKey(func(ctx context.Context, l *local, path string, _ []string, out *output) error {
		var d api.Draft
		if err := l.call(ctx, "GET", path+"/drafts/"+pathSegment(id), nil, &d); err != nil {
			return notFoundAs(err, "the inbox has no draft %q; postern draft list shows them", id)
		}
		return out.facts(d, func() error { return printDraft(out, d) })
	})(ctx, nil, out)
}

func showCredential(ctx context.Context, l *local, id string, out *output) error {
	var grants api.GrantList
	if err := l.call(ctx, "GET", "/v1/grants", nil, &grants); err != nil {
		return err
	}
	found := []api.Credential{}
	for _, g := range grants.Grants {
		if g.ID == id {
			found = append(found, g)
		}
	}
	if len(found) > 0 {
		return printCredentials(out, found, true)
	}
	var accounts api.AccountList
	if err := l.call(ctx, "GET", "/v1/accounts", nil, &accounts); err != nil {
		return err
	}
	for _, a := range accounts.Accounts {
		if a.ID == id {
			return out.object(a)
		}
	}
	return fmt.Errorf("there is no grant or account %q; postern inbox show and postern key list show keys", id)
}

func showHook(ctx context.Context, l *local, id string, out *output) error {
	var h hook
	if err := l.call(ctx, "GET", "/events/webhooks/"+pathSegment(id), nil, &h); err != nil {
		return noHook(id, err)
	}
	return out.facts(h, func() error {
		state := "enabled"
		if !h.Enabled {
			state = "disabled " + printable(h.DisabledReason)
		}
		fmt.Fprintf(out, "webhook  %s, %s\nurl      %s\nstate    %s\nevents   %s\n\n", h.ID, printable(h.Name), printable(h.URL), strings.TrimSpace(state), strings.Join(h.Events, ", "))
		return listDeliveries(ctx, l, out, id, 20)
	})
}

// showDelivery looks for a delivery among the newest of each webhook.
func showDelivery(ctx context.Context, l *local, id string, out *output) error {
	var hooks []hook
	if err := l.call(ctx, "GET", "/events/webhooks", nil, &hooks); err != nil {
		return err
	}
	for _, h := range hooks {
		var list []hookDelivery
		if err := l.call(ctx, "GET", "/events/webhooks/"+pathSegment(h.ID)+"/deliveries?limit=100", nil, &list); err != nil {
			return err
		}
		for _, d := range list {
			if d.ID != id {
				continue
			}
			answer := "none"
			if d.Response != 0 {
				answer = strconv.Itoa(d.Response)
			}
			return out.facts(d, func() error {
				_, err := fmt.Fprintf(out, "delivery  %s to webhook %s\nevent     %s of sandbox %s\nstate     %s after %d attempts, made %s\nanswer    %s\nerror     %s\n",
					d.ID, h.ID, d.EventType, d.SandboxID, d.Status, d.Attempts, d.CreatedAt.Local().Format(time.DateTime), answer, cmp.Or(printable(d.Error), "none"))
				return err
			})
		}
	}
	return fmt.Errorf("no webhook has delivery %q among its newest 100", id)
}

func showVolume(ctx context.Context, l *local, id string, out *output) error {
	v, err := l.volume(ctx, id)
	if err != nil {
		return err
	}
	return out.facts(v, func() error {
		_, err := fmt.Fprintf(out, "volume   %s (%s)\nholds    %d MiB\non disk  %d MiB\nmade     %s\n", v.Name, v.VolumeID, v.SizeMB, v.UsedMB, orNever(&v.CreatedAt))
		return err
	})
}

func showDomain(ctx context.Context, l *local, id string, out *output) error {
	return printRecords(ctx, l, out, id)
}

func showSwitch(ctx context.Context, l *local, id string, out *output) error {
	var list api.SwitchList
	if err := l.call(ctx, "GET", "/v1/switches", nil, &list); err != nil {
		return err
	}
	for _, s := range list.Switches {
		if s.ID == id {
			return out.facts(s, func() error {
				addresses, err := l.addresses(ctx)
				printSwitch(out, s, addresses)
				return err
			})
		}
	}
	return fmt.Errorf("no kill switch %q is on; postern stop lists those that are", id)
}

func showInvitation(ctx context.Context, l *local, id string, out *output) error {
	var list api.InvitationList
	if err := l.call(ctx, "GET", "/v1/invitations", nil, &list); err != nil {
		return err
	}
	for _, v := range list.Invitations {
		if v.ID == id {
			return out.object(v)
		}
	}
	return fmt.Errorf("there is no link %q that can be used; postern person invitations lists them", id)
}
