package notify

import (
	"context"

	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// chatDecides reports whether a person may decide on a in a chat: the rule that asks
// about it says "chat: true". The policy in force is read each time, so that removing the
// key from a rule also stops buttons that were sent before.
//
// Only the rule that asked counts. The attack: a strict rule, the inbox's mode or a doubt
// asked about an action, and a laxer rule matches it later.
func (n *Notifier) chatDecides(ctx context.Context, tx *store.Tx, a oversight.Action) (bool, error) {
	if n.conf.Rules == nil || a.Rule == "" {
		return false, nil
	}
	v, err := n.conf.Rules.Judge(ctx, tx, a.Project, a.Request)
	return err == nil && v.Effect == policy.Ask && v.Chat && v.Rule == a.Rule, err
}

// mayDecide is [Notifier.chatDecides] in a transaction of its own.
func (n *Notifier) mayDecide(ctx context.Context, a oversight.Action) (may bool, err error) {
	err = n.db.View(ctx, func(tx *store.Tx) error {
		may, err = n.chatDecides(ctx, tx, a)
		return err
	})
	return may, err
}
