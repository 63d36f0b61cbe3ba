# Sends as the guide of Rails configures it. Arguments: the sender, the recipient.
require "action_mailer"

sender, to = ARGV
ActionMailer::Base.delivery_method = :smtp
ActionMailer::Base.smtp_settings = {
  address: "smtp.gmail.com", port: 587, domain: "example.com", user_name: "user", password: "pass-of-the-program", authentication: "plain", enable_starttls_auto: true
}
class Notifier < ActionMailer::Base
  def hello(sender, to) = mail(from: sender, to: to, subject: "rails", body: "sent by rails\n.a line with a dot\n")
end
Notifier.hello(sender, to).deliver_now
