package main

import (
	"context"
	"crypto/tls"
	"errors"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"

	"postern/internal/event"
	"postern/internal/framing"
	"postern/internal/mailbox"
)

// serve runs every goroutine of the daemon and waits for each. The first part
// to end ends the others; what is in flight is finished.
func (d *daemon) serve(ctx context.Context, lis *listeners) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		// Nothing is executed until this succeeds; everything else works.
		for err := d.readRecord(ctx); err != nil; err = d.readRecord(ctx) {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			d.log.ErrorContext(ctx, "nothing is executed until the audit is read; trying again", "err", err)
			select {
			case <-ctx.Done():
			case <-time.After(10 * time.Second):
			}
		}
		return d.gate.Run(ctx)
	})
	g.Go(func() error {
		// If this fails, the register knows only what is approved from now on. The next start tries again.
		if err := d.known.Fill(ctx, d.db, mailbox.ListedDomains); err != nil && ctx.Err() == nil {
			d.log.ErrorContext(ctx, "note known domains", "err", err)
		}
		return nil
	})
	g.Go(func() error { return d.sequencer.Run(ctx) })
	g.Go(func() error { return d.record.Run(ctx) })
	g.Go(func() error { return d.sinks.Run(ctx) })
	g.Go(func() error { return d.console.Run(ctx) })
	if d.conf.KeepActions > 0 {
		g.Go(func() error { return d.gate.RunRetention(ctx, d.conf.KeepActions) })
	}
	g.Go(func() error { return d.keepMark(ctx) })
	g.Go(func() error { return d.connections.Run(ctx) })
	g.Go(func() error { return d.permits.Run(ctx, d.wall.Projects, d.wall.Recheck) })
	g.Go(func() error { return d.post.RunForget(ctx) })
	if d.conf.runsSandboxes() {
		g.Go(func() error { return d.hold.Run(ctx) })
		g.Go(func() error { return d.fleet.Run(ctx) })
		g.Go(func() error { return d.vols.Run(ctx) })
		g.Go(func() error { return d.sampler.Run(ctx) })
		g.Go(func() error { return d.builds.Run(ctx) })
		g.Go(func() error { return d.runs.Run(ctx) })
	}
	g.Go(func() error { return d.exports.Run(ctx) })
	g.Go(func() error { return d.logbook.Run(ctx) })
	g.Go(func() error { return d.casts.Run(ctx) })
	g.Go(func() error { return d.commands.Run(ctx) })
	g.Go(func() error { return d.hooks.Run(ctx) })
	g.Go(func() error { return d.post.RunExpiry(ctx) })
	g.Go(func() error { return d.scrubber.Run(ctx) })
	g.Go(func() error { return d.secrets.Run(ctx) })
	g.Go(func() error { return d.post.Events().Run(ctx) })
	if d.oauth != nil {
		g.Go(func() error { return d.oauth.Run(ctx) })
	}
	g.Go(func() error { return d.post.RunSweep(ctx) })
	g.Go(func() error { return d.mailboxes.Run(ctx) })
	g.Go(func() error { return d.doms.Run(ctx) })
	if d.notify != nil {
		g.Go(func() error { return d.notify.Run(ctx) })
		g.Go(func() error { return d.notify.RunTelegram(ctx) })
	}
	g.Go(func() error { return event.Run(ctx, d.log, d.db, event.Retention{}) })
	g.Go(func() error { return d.web.Serve(framing.Listener(lis.web)) })
	if lis.tls != nil {
		g.Go(func() error { return d.web.Serve(framing.Listener(tls.NewListener(lis.tls, d.web.TLSConfig))) })
	}
	if d.zone != nil {
		g.Go(func() error { return serveZone(ctx, d.zone, lis.dnsPackets, lis.dnsConns) })
	}
	if d.renew != nil {
		g.Go(func() error { return d.renew(ctx) })
	}
	g.Go(func() error { return d.local.Serve(lis.local) })
	g.Go(func() error { return d.smtp.Serve(lis.smtp) })
	if lis.submission != nil {
		g.Go(func() error { return d.smtp.ServeSubmission(lis.submission, false) })
	}
	if lis.submissions != nil {
		g.Go(func() error { return d.smtp.ServeSubmission(lis.submissions, true) })
	}
	if lis.imap != nil {
		g.Go(func() error { return d.imap.Serve(lis.imap, false) })
	}
	if lis.imaps != nil {
		g.Go(func() error { return d.imap.Serve(lis.imaps, true) })
	}
	g.Go(func() error {
		<-ctx.Done()
		d.log.InfoContext(ctx, "stopping; what is in flight is finished")
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		return errors.Join(shutdown(ctx, d.web), shutdown(ctx, d.local), d.smtp.Shutdown(ctx), d.imap.Shutdown(ctx), d.traces.Close(ctx))
	})
	err := g.Wait()
	if errors.Is(err, context.Canceled) || errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// shutdown lets requests in flight end and cuts those that do not in time.
func shutdown(ctx context.Context, s *http.Server) error {
	err := s.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		return s.Close()
	}
	return err
}
