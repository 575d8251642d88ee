from functools import partial

from django.urls import path

from . import views

urlpatterns = [
    path("pay/<int:pk>/", views.pay),
    path("touch/<int:pk>/", views.touch),
    path("pay-without-transaction/<int:pk>/", views.pay_without_transaction),
    path("pay-without-transaction-below/<int:pk>/", views.pay_without_transaction_below),
    path("pay-under-two-locks/<int:pk>/", views.pay_under_two_locks),
    path("pay-class/<int:pk>/", views.Pay.as_view()),
    path("pay-whole-class/<int:pk>/", views.PayWholeClass.as_view()),
    path("pay-its-method/<int:pk>/", views.PayByItsMethod.as_view()),
    path("pay-by-method/<int:pk>/", views.PayByMethod.as_view()),
    path("pay-decorated-method/<int:pk>/", views.PayByDecoratedMethod.as_view()),
    path("pay-class-and-method/<int:pk>/", views.PayByClassAndMethod.as_view()),
    path("pay-part/<int:pk>/", partial(views.pay)),
    path("apay/<int:pk>/", views.apay),
    path("apay-class/<int:pk>/", views.APay.as_view()),
    path("apay-whole-class/<int:pk>/", views.APayWholeClass.as_view()),
    path("apay-its-method/<int:pk>/", views.APayByItsMethod.as_view()),
    path("busy-inside/", views.busy_inside),
    path("abusy-inside/", views.abusy_inside),
    path("stream/<int:pk>/", views.stream),
    path("astream/<int:pk>/", views.astream),
]
